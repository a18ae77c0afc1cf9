#include "backend/nccl/rendezvous.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "nccl/aside.h"

namespace weightsync {
namespace {

using shm::Clock;
using shm::Code;
using shm::Deadline;
using shm::Result;
using shm::Status;

// In front of an answer.
constexpr std::uint8_t kGoOn = 1;
constexpr std::uint8_t kCalledOff = 0;

// A store whose server is gone is noticed after this, even without a deadline.
constexpr std::chrono::hours kLongest{1};

// For the first attempt to connect to a store, after which an abort is noticed. Each
// other has twice as long: torch asks a name server in between, which may be slow.
constexpr std::chrono::milliseconds kTry{1000};
constexpr std::chrono::milliseconds kLongestTry{64000};

// How long after its deadline an attempt may take to say who was missing.
constexpr std::chrono::seconds kSay{2};

std::chrono::milliseconds left_until(Deadline deadline) {
  const auto left = std::min<Clock::duration>(deadline - Clock::now(), kLongest);
  return std::max(std::chrono::milliseconds(1),
                  std::chrono::duration_cast<std::chrono::milliseconds>(left));
}

std::vector<std::uint8_t> bytes_of(const std::string& text) {
  return {text.begin(), text.end()};
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

Status store_error(const std::exception& error) {
  return {Code::kPeer, std::string("the store of rank 0: ") + error.what()};
}

}  // namespace

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
  const Address address =
      Address::parse(Handle::parse(plan_.handles.front()).value().store).value();
  c10d::TCPStoreOptions options;
  options.port = address.port;
  options.waitWorkers = false;
  // TCPStore tries again and again where nobody listens, and cannot be interrupted.
  c10::intrusive_ptr<c10d::TCPStore> found;
  for (auto attempt = kTry; !found; attempt = std::min(2 * attempt, kLongestTry)) {
    Status status = given_up();
    if (!status.ok()) return status;
    options.timeout = std::min(attempt, left_until(deadline_));
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

void Rendezvous::give_up(const Status& why) {
  const std::lock_guard<std::mutex> lock(mu_);
  if (given_up_.ok()) given_up_ = why;
}

Status Rendezvous::given_up() const {
  const std::lock_guard<std::mutex> lock(mu_);
  return given_up_;
}

Status Rendezvous::aside(std::function<Status()> work) {
  const auto left = deadline_ - Clock::now();
  const Deadline until =
      Deadline::max() - kSay - Clock::now() < left ? Deadline::max() : deadline_ + kSay;
  Status status = nccl::run_aside(
      "the meeting of the ranks", until,
      [self = shared_from_this(), work = std::move(work)]() -> Status {
        try {
          return work();
        } catch (const std::exception& error) {
          return store_error(error);
        }
      },
      // Once more before it is left alone: it may tell the others.
      [this] {
        Status told = given_up();
        if (told.ok()) give_up(interrupted_());
        return told;
      });
  if (!status.ok()) give_up(status);
  return status;
}

Status Rendezvous::agree() {
  return aside([this] { return agree_here(); });
}

Status Rendezvous::agree_here() {
  Status connected = connect();
  if (!connected.ok()) return connected;
  if (plan_.rank == 0) {
    Status claimed = claim();
    if (!claimed.ok()) return claimed;
  }
  return meet([] { return Bytes(); }).status();
}

Result<ncclUniqueId> Rendezvous::exchange(std::shared_ptr<const nccl::Library> library,
                                          Deadline deadline) {
  deadline_ = deadline;
  ++meeting_;
  const auto id = std::make_shared<ncclUniqueId>();
  Status exchanged = aside([this, id, library = std::move(library)]() -> Status {
    auto met = meet([&]() -> Result<Bytes> {
      auto made = nccl::make_unique_id(*library);
      if (!made.ok()) return made.status();
      const auto* const begin =
          reinterpret_cast<const std::uint8_t*>(made.value().internal);
      return Bytes(begin, begin + kNcclUniqueIdBytes);
    });
    if (!met.ok()) return met.status();
    std::memcpy(id->internal, met.value().data(),
                std::min(met.value().size(), kNcclUniqueIdBytes));
    return {};
  });
  if (!exchanged.ok()) return exchanged;
  return *id;
}

Result<Rendezvous::Bytes> Rendezvous::meet(const Offer& offer) {
  return plan_.rank == 0 ? lead(offer) : follow();
}

Status Rendezvous::await(const std::function<Status(bool& done)>& look) {
  constexpr std::chrono::microseconds kSlowest{10000};
  std::chrono::microseconds pause{200};
  for (;;) {
    bool done = false;
    Status status = look(done);
    if (!status.ok() || done) return status;
    status = given_up();
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
  // If it fails the others wait until their time is over.
  (void)aside([this, why] {
    Status connected = connect();
    return connected.ok() ? call_off({Code::kInvalid, why}).status() : connected;
  });
}

Result<Rendezvous::Bytes> Rendezvous::read(const Bytes& answer) const {
  const Bytes rest(answer.begin() + (answer.empty() ? 0 : 1), answer.end());
  if (!answer.empty() && answer.front() == kGoOn) return rest;
  const std::string why(rest.begin(), rest.end());
  return Status{Code::kPeer, "reconfigure was called off: " + why};
}

void Rendezvous::forget() {
  // If it fails they are left lying about, no more.
  (void)aside([this] {
    remove_keys();
    return Status();
  });
}

void Rendezvous::remove_keys() {
  for (; meeting_ >= 0; --meeting_) {
    for (int rank = 1; rank < static_cast<int>(plan_.handles.size()); ++rank) {
      store_->deleteKey(here(rank));
    }
    store_->deleteKey(answer());
  }
}

}  // namespace weightsync
