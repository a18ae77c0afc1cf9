#include "emulator/nccl/point_to_point.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <utility>

#include "emulator/nccl/comm.h"
#include "emulator/nccl/diagnosis.h"
#include "emulator/nccl/group.h"
#include "emulator/nccl/operations.h"
#include "emulator/nccl/stall.h"

namespace weightsync::emulator::nccl {

namespace {

[[noreturn]] void diagnose_mismatch(const Communicator& communicator, int source,
                                    const std::string& sent, const std::string& sent_at,
                                    const Message& received) {
  const std::string receiver = std::to_string(communicator.rank());
  diagnosis::end_process(
      {communicator.describe() +
           ": a send and its receive disagree, which NCCL would answer with wrong "
           "data or a hang",
       "rank " + std::to_string(source) + " called ncclSend of " + sent + " to rank " +
           receiver + " from " + sent_at,
       "rank " + receiver + " called " + describe(received) + " from " +
           received.call_site});
}

Outcome alone_in_group(const Message& message) {
  return invalid_usage(describe(message) +
                       ", which is this rank itself, without its counterpart in the "
                       "same group");
}

}  // namespace

std::string describe(const Message& message) {
  return std::string(message.sends ? "ncclSend of " : "ncclRecv of ") +
         describe_elements(message.count, message.type) +
         (message.sends ? " to rank " : " from rank ") + std::to_string(message.peer);
}

// One execution. Messages to and from a peer are lanes, each in order.
class PointToPoint::Run {
 public:
  Run(const std::vector<Message>& messages, Execution& execution)
      : messages_(messages),
        execution_(execution),
        communicator_(execution.communicator()),
        rank_(communicator_.rank()) {}

  Outcome run() {
    if (Outcome checked = check_buffers(); !checked.ok()) return checked;
    copy_to_self();
    if (Outcome opened = open_lanes(); !opened.ok()) return opened;
    for (;;) {
      announce();
      if (Outcome received = receive(); !received.ok()) return received;
      if (finished()) return {};
      if (!execution_.wait([&] { return can_move() || finished(); },
                           [&] { return missing(); })) {
        return {};
      }
    }
  }

 private:
  struct Outgoing {
    std::vector<std::pair<const Message*, SharedBuffer>> messages;
    std::uint64_t first = 0;  // number of the first message, for this pair of ranks
    std::size_t announced = 0;
  };
  struct Incoming {
    std::vector<const Message*> messages;
    std::size_t received = 0;
  };

  Inbox& inbox_at(int peer) {
    return communicator_.control(peer).inbox[static_cast<std::size_t>(rank_)];
  }
  Inbox& inbox_from(int peer) {
    return communicator_.control().inbox[static_cast<std::size_t>(peer)];
  }

  Outcome check_buffers() {
    for (const Message& message : messages_) {
      if (message.count == 0) continue;
      Outcome access = check_access(communicator_, message.buffer, message.nbytes());
      if (!access.ok()) return access;
    }
    return {};
  }

  void copy_to_self() {
    std::vector<const Message*> sends;
    std::vector<const Message*> receives;
    for (const Message& message : messages_) {
      if (message.peer != rank_) continue;
      (message.sends ? sends : receives).push_back(&message);
    }
    for (std::size_t i = 0; i < sends.size(); ++i) {
      const Message& from = *sends[i];
      const Message& to = *receives[i];
      if (from.count != to.count || from.type != to.type) {
        diagnose_mismatch(communicator_, rank_,
                          describe_elements(from.count, from.type), from.call_site, to);
      }
      if (from.count > 0 && from.buffer != to.buffer) {
        std::memmove(to.buffer, from.buffer, from.nbytes());
      }
    }
  }

  Outcome open_lanes() {
    for (const Message& message : messages_) {
      if (message.peer == rank_) continue;
      if (!message.sends) {
        incoming_[message.peer].messages.push_back(&message);
        continue;
      }
      Outgoing& lane = outgoing_[message.peer];
      lane.first = inbox_at(message.peer).posted.load();
      auto& [sent, buffer] = lane.messages.emplace_back(&message, SharedBuffer{});
      if (message.count == 0) continue;
      Outcome shared = SharedBuffer::create(sent->buffer, sent->nbytes(), true, buffer);
      if (!shared.ok()) return shared;
    }
    return {};
  }

  bool can_announce(int peer, const Outgoing& lane) {
    return lane.announced < lane.messages.size() &&
           lane.first + lane.announced < inbox_at(peer).taken.load() + kInboxRing;
  }

  void announce() {
    for (auto& [peer, lane] : outgoing_) {
      while (can_announce(peer, lane)) announce_next(peer, lane);
    }
  }

  void announce_next(int peer, Outgoing& lane) {
    const auto& [message, buffer] = lane.messages[lane.announced];
    const MessageDescriptor descriptor{buffer.remote(), message->count, message->type,
                                       text_of(message->call_site)};
    Inbox& inbox = inbox_at(peer);
    const std::uint64_t number = lane.first + lane.announced;
    std::memcpy(inbox.ring[number % kInboxRing], &descriptor, sizeof descriptor);
    inbox.posted.store(number + 1);
    communicator_.ring(peer);
    ++lane.announced;
  }

  bool can_receive(int peer, const Incoming& lane) {
    Inbox& inbox = inbox_from(peer);
    return lane.received < lane.messages.size() &&
           inbox.posted.load() > inbox.taken.load();
  }

  Outcome receive() {
    for (auto& [peer, lane] : incoming_) {
      while (can_receive(peer, lane)) {
        if (Outcome received = receive_next(peer, lane); !received.ok()) {
          return received;
        }
      }
    }
    return {};
  }

  Outcome receive_next(int peer, Incoming& lane) {
    Inbox& inbox = inbox_from(peer);
    const std::uint64_t number = inbox.taken.load();
    MessageDescriptor sent;
    std::memcpy(&sent, inbox.ring[number % kInboxRing], sizeof sent);
    const Message& message = *lane.messages[lane.received];
    if (sent.count != message.count || sent.type != message.type) {
      diagnose_mismatch(communicator_, peer, describe_elements(sent.count, sent.type),
                        to_string(sent.call_site), message);
    }
    if (message.count > 0) {
      const std::byte* const from = execution_.map(sent.buffer);
      if (from == nullptr) {
        return {ncclRemoteError, "the memory of rank " + std::to_string(peer) +
                                     " is gone: " + nccl::describe(message)};
      }
      std::memcpy(message.buffer, from, message.nbytes());
    }
    inbox.taken.store(number + 1);
    communicator_.ring(peer);
    ++lane.received;
    return {};
  }

  bool is_taken(int peer, const Outgoing& lane) {
    return inbox_at(peer).taken.load() >= lane.first + lane.messages.size();
  }

  bool can_move() {
    return std::any_of(outgoing_.begin(), outgoing_.end(),
                       [&](const auto& lane) {
                         return can_announce(lane.first, lane.second);
                       }) ||
           std::any_of(incoming_.begin(), incoming_.end(), [&](const auto& lane) {
             return can_receive(lane.first, lane.second);
           });
  }

  bool finished() {
    return std::all_of(
               outgoing_.begin(), outgoing_.end(),
               [&](const auto& lane) { return is_taken(lane.first, lane.second); }) &&
           std::all_of(incoming_.begin(), incoming_.end(), [](const auto& lane) {
             return lane.second.received == lane.second.messages.size();
           });
  }

  std::string missing() {
    std::string text;
    const auto add = [&](const std::string& what) {
      text += (text.empty() ? "" : "; ") + what;
    };
    for (const auto& [peer, lane] : outgoing_) {
      const std::uint64_t taken = inbox_at(peer).taken.load() - lane.first;
      if (taken >= lane.messages.size()) continue;
      add("for rank " + std::to_string(peer) +
          " to receive: " + nccl::describe(*lane.messages[taken].first));
    }
    for (const auto& [peer, lane] : incoming_) {
      if (lane.received == lane.messages.size()) continue;
      add("for rank " + std::to_string(peer) +
          " to send: " + nccl::describe(*lane.messages[lane.received]));
    }
    return text;
  }

  const std::vector<Message>& messages_;
  Execution& execution_;
  Communicator& communicator_;
  const int rank_;

  std::map<int, Outgoing> outgoing_;  // by peer
  std::map<int, Incoming> incoming_;
};

std::string PointToPoint::describe() const {
  if (messages_.size() == 1) return nccl::describe(messages_.front());
  return "a group of " + std::to_string(messages_.size()) +
         " sends and receives, the first of them " + nccl::describe(messages_.front());
}

bool PointToPoint::absorb(Operation& next) {
  auto* const other = dynamic_cast<PointToPoint*>(&next);
  if (other == nullptr) return false;
  std::move(other->messages_.begin(), other->messages_.end(),
            std::back_inserter(messages_));
  return true;
}

Outcome PointToPoint::prepare(Communicator& communicator) {
  std::vector<const Message*> unmatched;
  for (const Message& message : messages_) {
    if (message.peer != communicator.rank()) continue;
    const auto counterpart = std::find_if(
        unmatched.begin(), unmatched.end(),
        [&](const Message* other) { return other->sends != message.sends; });
    if (counterpart == unmatched.end()) {
      unmatched.push_back(&message);
    } else {
      unmatched.erase(counterpart);
    }
  }
  return unmatched.empty() ? Outcome{} : alone_in_group(*unmatched.front());
}

Outcome PointToPoint::run(Execution& execution) {
  for (const Message& message : messages_) {
    if (!carry_out_watched(execution.communicator(), message.fault)) return {};
  }
  return Run(messages_, execution).run();
}

namespace {

Outcome add(Message message, OperationKind kind, ncclDataType_t datatype,
            const CommunicatorPtr& communicator, cudaStream_t stream) {
  Outcome checked = check_call(*communicator, "peer", message.peer, datatype);
  if (!checked.ok()) return checked;
  Outcome failed = ask_faults(kind, *communicator, message.fault);
  if (!failed.ok()) return failed;
  message.type = static_cast<DataType>(datatype);
  message.call_site = describe_address(current_call().address);
  return add_operation(communicator, std::make_shared<PointToPoint>(std::move(message)),
                       stream);
}

}  // namespace

Outcome send(const void* sendbuff, std::size_t count, ncclDataType_t datatype, int peer,
             const CommunicatorPtr& communicator, cudaStream_t stream) {
  Message message;
  message.sends = true;
  message.peer = peer;
  message.buffer = const_cast<void*>(sendbuff);
  message.count = count;
  return add(std::move(message), OperationKind::kSend, datatype, communicator, stream);
}

Outcome recv(void* recvbuff, std::size_t count, ncclDataType_t datatype, int peer,
             const CommunicatorPtr& communicator, cudaStream_t stream) {
  Message message;
  message.peer = peer;
  message.buffer = recvbuff;
  message.count = count;
  return add(std::move(message), OperationKind::kRecv, datatype, communicator, stream);
}

}  // namespace weightsync::emulator::nccl
