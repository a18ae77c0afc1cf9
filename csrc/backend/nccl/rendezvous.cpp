#include "backend/nccl/rendezvous.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <random>
#include <thread>
#include <utility>

namespace weightsync {
namespace {

using shm::Clock;
using shm::Code;
using shm::Deadline;
using shm::Result;
using shm::Status;

constexpr const char* kScheme = "nccl2";

// In front of an answer.
constexpr std::uint8_t kGoOn = 1;
constexpr std::uint8_t kCalledOff = 0;

// A store whose server is gone is noticed after this, even without a deadline.
constexpr std::chrono::hours kLongest{1};

// For one attempt to connect to a store: after it an abort is noticed.
constexpr std::chrono::milliseconds kTry{1000};

std::chrono::milliseconds left_until(Deadline deadline) {
  const auto left = std::min<Clock::duration>(deadline - Clock::now(), kLongest);
  return std::max(std::chrono::milliseconds(1),
                  std::chrono::duration_cast<std::chrono::milliseconds>(left));
}

std::vector<std::uint8_t> bytes_of(const std::string& text) {
  return {text.begin(), text.end()};
}

std::string hex(std::uint64_t number) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(number));
  return text;
}

// FNV-1a: the same in every build.
std::string digest_of(const Rendezvous::Plan& plan) {
  std::uint64_t hash = 14695981039346656037ULL;
  const auto add = [&hash](const std::string& text) {
    for (const char each : text) {
      hash = (hash ^ static_cast<unsigned char>(each)) * 1099511628211ULL;
    }
  };
  add(std::to_string(plan.uuid));
  for (const std::string& handle : plan.handles) add("\n" + handle);
  return hex(hash);
}

Status out_of_time(std::int64_t uuid, const std::vector<int>& missing) {
  std::string ranks;
  for (const int rank : missing) ranks += " " + std::to_string(rank);
  return {Code::kTimedOut, "reconfigure " + std::to_string(uuid) +
                               ": these ranks did not come in time:" + ranks};
}

template <class Number>
bool read_number(const std::string& text, Number& number) {
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && rest == end;
}

struct Address {
  std::string host;
  std::uint16_t port = 0;
  std::string prefix;
};

bool read_address(const std::string& text, Address& address) {
  const std::size_t slash = text.find('/');
  const std::size_t colon = text.rfind(':', slash);
  if (slash == std::string::npos || colon == std::string::npos || colon == 0) {
    return false;
  }
  address.host = text.substr(0, colon);
  address.prefix = text.substr(slash + 1);
  return read_number(text.substr(colon + 1, slash - colon - 1), address.port);
}

// c10d tells the store behind a prefix, and not the prefix.
struct Peek : c10d::PrefixStore {
  static const std::string& prefix_of(const c10d::PrefixStore& store) {
    return store.*(&Peek::prefix_);
  }
};

// The store that listens, with the prefixes in front of it; null if none does.
c10d::TCPStore* listening(const c10::intrusive_ptr<c10d::Store>& store,
                          std::string& prefix) {
  c10::intrusive_ptr<c10d::Store> inner = store;
  while (auto* const outer = dynamic_cast<c10d::PrefixStore*>(inner.get())) {
    const std::string& added = Peek::prefix_of(*outer);
    prefix = prefix.empty() ? added : added + "/" + prefix;
    inner = outer->getUnderlyingStore();
  }
  return dynamic_cast<c10d::TCPStore*>(inner.get());
}

// A socket that listens on this machine alone: TCPStore itself listens to everybody.
Result<int> listen_here(std::uint16_t& port) {
  const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (socket < 0) return shm::system_error("make a socket", errno);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  if (::bind(socket, any, size) != 0 || ::listen(socket, SOMAXCONN) != 0 ||
      ::getsockname(socket, any, &size) != 0) {
    const int error = errno;
    ::close(socket);
    return shm::system_error("listen on 127.0.0.1", error);
  }
  port = ntohs(address.sin_port);
  return socket;
}

Status store_error(const std::exception& error) {
  return {Code::kPeer, std::string("the store of rank 0: ") + error.what()};
}

}  // namespace

// --- handles ---

std::string Handle::text() const {
  return std::string(kScheme) + ":" + std::to_string(rank) + ":" +
         std::to_string(uuid) + ":" + instance + ":" + store;
}

Result<Handle> Handle::parse(const std::string& text) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  for (int i = 0; i < 4; ++i) {
    const std::size_t end = text.find(':', begin);
    if (end == std::string::npos) break;
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  Handle handle;
  Address address;
  const bool fits = parts.size() == 4 && parts[0] == kScheme &&
                    read_number(parts[1], handle.rank) &&
                    read_number(parts[2], handle.uuid) && !parts[3].empty() &&
                    read_address(text.substr(begin), address);
  if (!fits) {
    return Status{Code::kInvalid,
                  "expected nccl2:<rank>:<uuid>:<instance>:<store>, "
                  "as get_reconfigure_handle() gives; found \"" +
                      text + "\""};
  }
  handle.instance = parts[3];
  handle.store = text.substr(begin);
  return handle;
}

std::string new_instance() {
  std::random_device random;
  const auto half = [&random] {
    return hex((static_cast<std::uint64_t>(random()) << 32) | random());
  };
  return half() + half();
}

Result<std::string> address_of(const c10::intrusive_ptr<c10d::Store>& store,
                               c10::intrusive_ptr<c10d::Store>& server) {
  std::string prefix;
  if (auto* const found = listening(store, prefix)) {
    return found->getHost() + ":" + std::to_string(found->getPort()) + "/" + prefix;
  }
  try {
    if (!server) {
      c10d::TCPStoreOptions options;
      auto socket = listen_here(options.port);
      if (!socket.ok()) return socket.status();
      options.isServer = true;
      options.waitWorkers = false;
      options.masterListenFd = socket.value();
      server = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    }
    const auto& mine = dynamic_cast<const c10d::TCPStore&>(*server);
    return mine.getHost() + ":" + std::to_string(mine.getPort()) + "/";
  } catch (const std::exception& error) {
    return Status{Code::kSystem, std::string("cannot start a store: ") + error.what()};
  }
}

// --- the meeting ---

Rendezvous::Rendezvous(Plan plan, Deadline deadline, Interrupted interrupted)
    : plan_(std::move(plan)),
      interrupted_(std::move(interrupted)),
      digest_(digest_of(plan_)),
      deadline_(deadline) {}

std::string Rendezvous::here(int rank) const {
  return digest_ + "/" + std::to_string(meeting_) + "/here/" + std::to_string(rank);
}

std::string Rendezvous::answer() const {
  return digest_ + "/" + std::to_string(meeting_) + "/answer";
}

Status Rendezvous::connect() {
  if (store_) return {};
  Address address;
  read_address(Handle::parse(plan_.handles.front()).value().store, address);
  c10d::TCPStoreOptions options;
  options.port = address.port;
  options.waitWorkers = false;
  // TCPStore tries again and again where nobody listens, and cannot be interrupted.
  c10::intrusive_ptr<c10d::TCPStore> found;
  while (!found) {
    Status status = interrupted_();
    if (!status.ok()) return status;
    options.timeout = std::min(kTry, left_until(deadline_));
    try {
      found = c10::make_intrusive<c10d::TCPStore>(address.host, options);
    } catch (const std::exception&) {
      if (Clock::now() >= deadline_) throw;
    }
  }
  found->setTimeout(left_until(deadline_));
  store_ = c10::make_intrusive<c10d::PrefixStore>(
      address.prefix + "/weightsync-nccl2/reconfigure/" + std::to_string(plan_.uuid),
      std::move(found));
  return {};
}

Status Rendezvous::agree() {
  try {
    Status connected = connect();
    if (!connected.ok()) return connected;
    if (plan_.rank == 0) {
      Status claimed = claim();
      if (!claimed.ok()) return claimed;
    }
  } catch (const std::exception& error) {
    return store_error(error);
  }
  return meet([] { return Bytes(); }).status();
}

Result<ncclUniqueId> Rendezvous::exchange(const nccl::Library& library,
                                          Deadline deadline) {
  deadline_ = deadline;
  ++meeting_;
  auto met = meet([&]() -> Result<Bytes> {
    auto made = nccl::make_unique_id(library);
    if (!made.ok()) return made.status();
    const auto* const begin =
        reinterpret_cast<const std::uint8_t*>(made.value().internal);
    return Bytes(begin, begin + kNcclUniqueIdBytes);
  });
  if (!met.ok()) return met.status();
  ncclUniqueId id{};
  std::memcpy(id.internal, met.value().data(),
              std::min(met.value().size(), kNcclUniqueIdBytes));
  return id;
}

Result<Rendezvous::Bytes> Rendezvous::meet(const Offer& offer) {
  try {
    return plan_.rank == 0 ? lead(offer) : follow();
  } catch (const std::exception& error) {
    return store_error(error);
  }
}

Status Rendezvous::await(const std::function<Status(bool& done)>& look) {
  constexpr std::chrono::microseconds kSlowest{10000};
  std::chrono::microseconds pause{200};
  for (;;) {
    bool done = false;
    Status status = look(done);
    if (!status.ok() || done) return status;
    status = interrupted_();
    if (!status.ok()) return status;
    if (Clock::now() >= deadline_) return {Code::kTimedOut, ""};
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kSlowest);
  }
}

Status Rendezvous::claim() {
  const Bytes claim = bytes_of(digest_ + ":" + new_instance());
  if (store_->compareSet("claimed", Bytes(), claim) == claim) return {};
  Status used{Code::kInvalid,
              "reconfigure: uuid " + std::to_string(plan_.uuid) + " was used before"};
  (void)call_off(used);
  return used;
}

Result<Rendezvous::Bytes> Rendezvous::lead(const Offer& offer) {
  std::vector<int> missing;
  for (int rank = 1; rank < static_cast<int>(plan_.handles.size()); ++rank) {
    missing.push_back(rank);
  }
  Bytes answered;
  const Status came = await([&](bool& done) -> Status {
    if (store_->check({answer()})) {
      answered = store_->get(answer());
      done = true;
      return {};
    }
    while (!missing.empty() && store_->check({here(missing.back())})) {
      missing.pop_back();
    }
    done = missing.empty();
    return {};
  });
  if (came.code() == Code::kTimedOut) {
    const auto is_here = [this](int rank) { return store_->check({here(rank)}); };
    missing.erase(std::remove_if(missing.begin(), missing.end(), is_here),
                  missing.end());
    if (!missing.empty()) return call_off(out_of_time(plan_.uuid, missing));
  } else if (!came.ok()) {
    return call_off(came);
  }
  if (!answered.empty()) return read(answered);
  auto offered = offer();
  if (!offered.ok()) return call_off(offered.status());
  Bytes said(1 + offered.value().size(), kGoOn);
  std::copy(offered.value().begin(), offered.value().end(), said.begin() + 1);
  return read(store_->compareSet(answer(), Bytes(), said));
}

Result<Rendezvous::Bytes> Rendezvous::follow() {
  store_->set(here(plan_.rank), Bytes{1});
  Bytes answered;
  const Status came = await([&](bool& done) -> Status {
    if (store_->check({answer()})) {
      answered = store_->get(answer());
      done = true;
    } else if (store_->check({"claimed"})) {
      const Bytes claim = store_->get("claimed");
      if (claim.size() < digest_.size() ||
          !std::equal(digest_.begin(), digest_.end(), claim.begin())) {
        return {Code::kInvalid,
                "reconfigure: uuid " + std::to_string(plan_.uuid) +
                    " was used before, or rank 0 was given other handles"};
      }
    }
    return {};
  });
  if (came.code() == Code::kTimedOut) {
    std::vector<int> missing;
    for (int rank = 1; rank < static_cast<int>(plan_.handles.size()); ++rank) {
      if (!store_->check({here(rank)})) missing.push_back(rank);
    }
    if (missing.empty()) missing.push_back(0);
    return call_off(out_of_time(plan_.uuid, missing));
  }
  if (!came.ok()) return call_off(came);
  return read(answered);
}

Result<Rendezvous::Bytes> Rendezvous::call_off(Status why) {
  Bytes said{kCalledOff};
  const Bytes text = bytes_of(why.message());
  said.insert(said.end(), text.begin(), text.end());
  const Bytes answered = store_->compareSet(answer(), Bytes(), said);
  // Too late to call it off: the others go on, and wait for this one.
  if (!answered.empty() && answered.front() == kGoOn) return read(answered);
  return why;
}

void Rendezvous::refuse(const std::string& why) {
  try {
    if (connect().ok()) (void)call_off({Code::kInvalid, why});
  } catch (const std::exception&) {
    // Then the others wait until their time is over.
  }
}

Result<Rendezvous::Bytes> Rendezvous::read(const Bytes& answer) const {
  const Bytes rest(answer.begin() + (answer.empty() ? 0 : 1), answer.end());
  if (!answer.empty() && answer.front() == kGoOn) return rest;
  const std::string why(rest.begin(), rest.end());
  return Status{Code::kPeer, "reconfigure was called off: " + why};
}

void Rendezvous::forget() {
  if (!store_) return;
  try {
    for (; meeting_ >= 0; --meeting_) {
      for (int rank = 1; rank < static_cast<int>(plan_.handles.size()); ++rank) {
        store_->deleteKey(here(rank));
      }
      store_->deleteKey(answer());
    }
  } catch (const std::exception&) {
    // It is left lying about, no more.
  }
}

}  // namespace weightsync
