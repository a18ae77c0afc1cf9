// ncclPutSignal and ncclSignal. A signal is a put without data.
#include <atomic>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "emulator/core.h"
#include "emulator/nccl/group.h"
#include "emulator/nccl/numbers.h"
#include "emulator/nccl/operations.h"
#include "emulator/nccl/process_faults.h"
#include "emulator/nccl/rma.h"
#include "emulator/nccl/rma_plan.h"
#include "emulator/nccl/shared_segments.h"
#include "emulator/nccl/stall.h"
#include "emulator/nccl/switches.h"
#include "emulator/nccl/window.h"
#include "shm/copy.h"

namespace weightsync::emulator::nccl {
namespace {

constexpr int kIllegalAddress = 700;  // cudaErrorIllegalAddress
constexpr std::size_t kLarge = std::size_t{1} << 20;

using Shared = std::shared_ptr<const Window>;

struct Put {
  // As called.
  const std::byte* source = nullptr;
  std::size_t nbytes = 0;
  Shared window;  // null for a signal
  std::size_t offset = 0;
  int peer = 0;
  int context = 0;
  Action fault;

  // Of the launch.
  std::vector<Piece> pieces;
  std::uint64_t number = 0;
  bool remote = false;
};

std::string describe_put(const Put& put) {
  const std::string to = " to rank " + std::to_string(put.peer);
  if (!put.window) return "ncclSignal" + to;
  return "ncclPutSignal of " + std::to_string(put.nbytes) + " bytes" + to +
         " at offset " + std::to_string(put.offset);
}

// A copy engine that runs out of its mappings is CUDA's fault, not one of NCCL; what a
// network card refuses is told to nobody.
bool fault(const Communicator& communicator, const Put& put, const std::string& found) {
  const std::string message = describe_put(put) + ": " + found;
  complain(communicator.describe() + ": " + message);
  if (!put.remote) poison(communicator.device(), kIllegalAddress, message);
  return false;
}

// As a device copies: as fast as the memory goes. What overlaps (a put to oneself) has
// no defined result on hardware, but must not break anything here.
void move_bytes(std::byte* target, const std::byte* source, std::size_t nbytes) {
  const bool apart = std::less_equal<>{}(source + nbytes, target) ||
                     std::less_equal<>{}(target + nbytes, source);
  if (!apart || nbytes < kLarge) {
    std::memmove(target, source, nbytes);
    return;
  }
  static const std::atomic<bool> kNever{false};
  (void)shm::copy_runs({{source, target, 1, nbytes, nbytes, nbytes}},
                       shm::useful_threads(nbytes), kNever);
}

// The peer may have freed its memory meanwhile: the window still maps it.
bool copy_piece(const Communicator& communicator, const Put& put, const Piece& piece) {
  if (piece.nbytes == 0) return true;
  const std::byte* const source = put.source + piece.at;
  if (const shm::Status range = check_range(source, piece.nbytes); !range.ok()) {
    return fault(communicator, put, "its source: " + range.message());
  }
  const Window::Peer& peer = put.window->peers[static_cast<std::size_t>(put.peer)];
  const std::size_t at = piece.at + target_offset(put.window->offset, put.offset,
                                                  put.remote, emulated_version());
  if (at > peer.nbytes || piece.nbytes > peer.nbytes - at) {
    return fault(communicator, put,
                 "its target lies at " + std::to_string(at) +
                     " of the allocation, which has " + std::to_string(peer.nbytes) +
                     " bytes on that rank");
  }
  move_bytes(peer.base + at, source, piece.nbytes);
  return true;
}

// The data, then the signal. A copy engine writes the number of the signal, a network
// card adds to it. False: it went wrong, and there is no signal.
bool transfer(Communicator& communicator, const Put& put) {
  for (const Piece& piece : put.pieces) {
    if (!copy_piece(communicator, put, piece)) return false;
  }
  auto& inbox = communicator.control(put.peer)
                    .inbox[static_cast<std::size_t>(communicator.rank())];
  std::atomic<std::uint64_t>& arrived = inbox.signals[put.context];
  if (put.remote) {
    arrived.fetch_add(1);
  } else {
    arrived.store(put.number);
  }
  communicator.ring(put.peer);
  return true;
}

// The puts and signals of a group that follow each other, in their order.
class PutBatch : public Operation {
 public:
  explicit PutBatch(Put put) { puts_.push_back(std::move(put)); }

  Phase phase() const override { return Phase::kOneSided; }

  std::string describe() const override {
    std::string text = describe_put(puts_.front());
    if (puts_.size() > 1) text += " and " + std::to_string(puts_.size() - 1) + " more";
    return text;
  }

  bool absorb(Operation& next) override {
    auto* const more = dynamic_cast<PutBatch*>(&next);
    if (more == nullptr) return false;
    for (Put& put : more->puts_) puts_.push_back(std::move(put));
    return true;
  }

  // A failure leaves the numbers taken before: as in NCCL, the next signal to such a
  // peer counts for two.
  Outcome launch(Communicator& communicator) override {
    auto& signals = communicator.part<Signals>();
    for (Put& put : puts_) {
      put.remote = signals.is_remote(communicator.rank(), put.peer);
      put.pieces = cut(put.nbytes, switches().put_piece);
      put.number = signals.number_next(put.context, put.peer);
      if (Outcome checked = check_offset(put); !checked.ok()) return checked;
    }
    return {};
  }

  Outcome run(Execution& execution) override {
    Communicator& communicator = execution.communicator();
    std::atomic<std::size_t> reported{0};
    std::size_t posted = 0;
    for (const Put& put : puts_) {
      if (!carry_out_watched(communicator, put.fault, OnAbort::kKeepWaiting)) {
        return {};
      }
      if (put.remote) {
        post(communicator, put, reported);
        ++posted;
      } else if (!transfer(communicator, put)) {
        break;
      }
    }
    if (posted > 0) await_proxy(execution, reported, posted);
    return {};
  }

 private:
  static Outcome check_offset(const Put& put) {
    if (put.remote || !put.window) return {};
    const auto beyond = offset_beyond(put.pieces, put.offset, put.window->nbytes);
    if (!beyond) return {};
    return invalid_argument(describe_put(put) + ": offset " + std::to_string(*beyond) +
                            " is beyond the window, which has " +
                            std::to_string(put.window->nbytes) + " bytes on this rank");
  }

  static void post(Communicator& communicator, const Put& put,
                   std::atomic<std::size_t>& reported) {
    Communicator* const self = &communicator;
    const Control* const peer = &communicator.control(put.peer);
    communicator.part<Signals>().proxy().post(
        {[peer] { return peer->gone.load() == 0 && !is_process_gone(peer->pid); },
         [self, &put] { return transfer(*self, put); },
         [self, &reported] {
           ++reported;
           self->ring(self->rank());
         }});
  }

  void await_proxy(Execution& execution, const std::atomic<std::size_t>& reported,
                   std::size_t posted) const {
    execution.wait([&] { return reported.load() == posted; },
                   [&] {
                     return "for the network to complete " +
                            std::to_string(posted - reported.load()) + " of " +
                            std::to_string(posted) + " puts";
                   },
                   OnAbort::kKeepWaiting);
    execution.communicator().part<Signals>().proxy().settle();
  }

  std::vector<Put> puts_;
};

HandleState state_of(ncclWindow_t handle, const Shared& window) {
  if (handle == nullptr) return HandleState::kNull;
  if (!window) return HandleState::kUnknown;
  return window->putable ? HandleState::kUsable : HandleState::kNotPutable;
}

SourceState source_state_of(const void* buffer, const Shared& window) {
  if (buffer == nullptr) return SourceState::kNull;
  if (!window) return SourceState::kOutside;
  if (!window->symmetric()) return SourceState::kNotSymmetric;
  return window->putable ? SourceState::kUsable : SourceState::kNotPutable;
}

// What NCCL does not look at: the ends of source and target.
Outcome check_strictly(const Put& put, const Shared& source) {
  const auto at = static_cast<std::size_t>(put.source - source->base);
  if (put.nbytes > source->nbytes - at) {
    return invalid_argument(describe_put(put) + ": its source reaches " +
                            std::to_string(put.nbytes - (source->nbytes - at)) +
                            " bytes beyond the window it lies in");
  }
  const Window::Peer& peer = put.window->peers[static_cast<std::size_t>(put.peer)];
  if (put.offset > peer.window_nbytes || put.nbytes > peer.window_nbytes - put.offset) {
    return invalid_argument(describe_put(put) +
                            ": it ends beyond the window, which has " +
                            std::to_string(peer.window_nbytes) + " bytes on that rank");
  }
  return {};
}

// Counts the call for the faults, and adds it to the group.
Outcome add(const CommunicatorPtr& communicator, Put put, const char* name,
            OperationKind operation, cudaStream_t stream) {
  put.fault =
      process_faults().next(operation, process_faults().rank_of(communicator->rank()));
  if (const int code = failed(put.fault); code != 0) {
    return {static_cast<ncclResult_t>(code),
            "a fault was asked for: " + put.fault.entry};
  }
  if (Outcome made = add_signals(communicator, name); !made.ok()) return made;
  return add_operation(communicator, std::make_shared<PutBatch>(std::move(put)),
                       stream);
}

}  // namespace

Outcome put_signal(const void* localbuff, std::size_t count, ncclDataType_t datatype,
                   int peer, ncclWindow_t window, std::size_t offset, int signal_index,
                   int context, unsigned int flags, const CommunicatorPtr& communicator,
                   cudaStream_t stream) {
  // Rows 2 and 3 of the table, with a better message.
  if (Outcome usable = communicator->usable(); !usable.ok()) return usable;
  auto& windows = communicator->part<Windows>();
  const Shared target = windows.find(window);
  const Shared source = windows.find_address(localbuff);
  PutCall call;
  call.common = rma_call(*communicator);
  call.peer = peer;
  call.datatype = datatype;
  call.ctx = context;
  call.sig_idx = signal_index;
  call.flags = flags;
  call.window = state_of(window, target);
  call.source = source_state_of(localbuff, source);
  const Decision decision = decide_put(call);
  if (decision.code != ncclSuccess) {
    return {decision.code, "a put of " + std::to_string(count) + " elements to rank " +
                               std::to_string(peer) + ": " + decision.found};
  }
  Put put;
  put.source = static_cast<const std::byte*>(localbuff);
  put.nbytes = count * size_of(static_cast<DataType>(datatype));
  put.window = target;
  put.offset = offset;
  put.peer = peer;
  put.context = context;
  if (switches().strict) {
    if (Outcome checked = check_strictly(put, source); !checked.ok()) return checked;
  }
  return add(communicator, std::move(put), "ncclPutSignal", OperationKind::kPut,
             stream);
}

Outcome signal(int peer, int signal_index, int context, unsigned int flags,
               const CommunicatorPtr& communicator, cudaStream_t stream) {
  // Rows 2 and 3 of the table, with a better message.
  if (Outcome usable = communicator->usable(); !usable.ok()) return usable;
  PutCall call;
  call.common = rma_call(*communicator);
  call.is_put = false;
  call.peer = peer;
  call.ctx = context;
  call.sig_idx = signal_index;
  call.flags = flags;
  const Decision decision = decide_put(call);
  if (decision.code != ncclSuccess) {
    return {decision.code,
            "a signal to rank " + std::to_string(peer) + ": " + decision.found};
  }
  Put put;
  put.peer = peer;
  put.context = context;
  return add(communicator, std::move(put), "ncclSignal", OperationKind::kSignal,
             stream);
}

}  // namespace weightsync::emulator::nccl
