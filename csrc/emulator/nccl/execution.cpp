// Execution: how operations wait for other ranks, and how they get onto a stream.
#include <cstring>
#include <mutex>
#include <optional>
#include <utility>

#include "emulator/core.h"
#include "emulator/nccl/comm.h"
#include "emulator/nccl/diagnosis.h"
#include "emulator/nccl/group.h"
#include "emulator/nccl/operation.h"

namespace weightsync::emulator::nccl {
namespace {

// Where the launch stream of a group and its other streams wait for each other.
class Crossing {
 public:
  void arrive() {
    change([this] { ++arrived_; });
  }
  void leave() {
    change([this] { left_ = true; });
  }
  void await_arrivals(std::size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return arrived_ == count; });
  }
  void await_leave() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return left_; });
  }

 private:
  void change(const std::function<void()>& apply) {
    const std::lock_guard lock(mutex_);
    apply();
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::size_t arrived_ = 0;
  bool left_ = false;
};

// A place in the serial order that is given up even if the stream never gets to it.
class Place {
 public:
  Place(std::shared_ptr<Serial> serial, Serial::Pending pending)
      : serial_(std::move(serial)), place_(serial_->take(std::move(pending))) {}
  ~Place() { serial_->end(place_); }
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

  Serial& serial() { return *serial_; }
  std::uint64_t number() const { return place_; }

 private:
  const std::shared_ptr<Serial> serial_;
  const std::uint64_t place_;
};

std::string describe(const CallSite& call) {
  return call.address == nullptr ? "" : describe_address(call.address);
}

// What one operation needs on its stream.
struct Launch {
  std::shared_ptr<Communicator> communicator;
  std::shared_ptr<Operation> operation;
  std::unique_ptr<Place> place;
  std::uint64_t collective = 0;
  std::string call_site;
};

void run(Launch& launch) {
  launch.place->serial().await_turn(launch.place->number());
  launch.communicator->peer_memory().trim();
  {
    Execution execution(*launch.communicator, launch.collective, launch.place->number(),
                        launch.call_site);
    launch.communicator->fail(launch.operation->run(execution));
  }
  // The operation's state goes before others hear that it ended.
  launch.operation.reset();
  launch.place.reset();
}

}  // namespace

bool Execution::aborted() const { return communicator_.aborted(); }
int Execution::size() const { return communicator_.size(); }

bool Execution::wait(const std::function<bool()>& condition,
                     const std::function<std::string()>& missing, OnAbort on_abort) {
  const bool returns = on_abort == OnAbort::kReturn;
  if (returns && aborted()) return false;
  if (condition()) return true;
  shm::Doorbell& bell = communicator_.control().doorbell;
  communicator_.serial().note(place_, missing());
  set_operation_note(missing(), call_site_);
  bool held = true;
  {
    const diagnosis::Guard guard(communicator_, missing);
    const shm::Doorbell::Waiting waiting(bell);
    for (;;) {
      const std::uint32_t seen = bell.count();
      held = !(returns && aborted());
      if (!held || condition()) break;
      bell.wait(seen, shm::Deadline::max());
    }
  }
  communicator_.serial().note(place_, "");
  return held;
}

void Execution::publish(const void* bytes, std::size_t nbytes) {
  Control& mine = communicator_.control();
  std::memcpy(mine.posts[collective_ % kPostRing].bytes, bytes, nbytes);
  mine.posted.store(collective_ + 1, std::memory_order_release);
  for (int rank = 0; rank < size(); ++rank) communicator_.ring(rank);
}

const std::byte* Execution::await(int rank) {
  const Control& peer = communicator_.control(rank);
  const bool there =
      wait([&] { return peer.posted.load(std::memory_order_acquire) > collective_; },
           [&] {
             return "for rank " + std::to_string(rank) + " to come to collective " +
                    std::to_string(collective_) + " of this communicator";
           });
  return there ? peer.posts[collective_ % kPostRing].bytes : nullptr;
}

bool Execution::barrier() {
  const std::uint64_t step = collective_ * kSteps + ++step_;
  communicator_.control().step.store(step, std::memory_order_release);
  for (int rank = 0; rank < size(); ++rank) communicator_.ring(rank);
  for (int rank = 0; rank < size(); ++rank) {
    const Control& peer = communicator_.control(rank);
    const bool there = wait(
        [&] { return peer.step.load(std::memory_order_acquire) >= step; },
        [&] {
          return "for rank " + std::to_string(rank) + " to get through collective " +
                 std::to_string(collective_) + " of this communicator";
        });
    if (!there) return false;
  }
  return true;
}

std::byte* Execution::map(const Remote& remote) {
  mapped_.push_back(communicator_.peer_memory().map(remote));
  return mapped_.back().get();
}

void Communicator::enqueue(const std::vector<std::shared_ptr<Operation>>& operations,
                           const std::shared_ptr<Stream>& stream,
                           const std::vector<std::shared_ptr<Stream>>& joined) {
  const auto crossing = std::make_shared<Crossing>();
  const std::lock_guard order(serial_->launching());
  for (const auto& other : joined) {
    other->enqueue("join of a NCCL group", [crossing] { crossing->arrive(); });
  }
  if (!joined.empty()) {
    stream->enqueue("join of a NCCL group", [crossing, count = joined.size()] {
      crossing->await_arrivals(count);
    });
  }
  for (const auto& operation : operations) {
    auto launch = std::make_shared<Launch>();
    launch->communicator = shared_from_this();
    launch->operation = operation;
    launch->call_site = nccl::describe(operation->call());
    const std::string what = operation->describe();
    launch->place = std::make_unique<Place>(
        serial_, Serial::Pending{0, describe(), what, launch->call_site, "", false});
    if (operation->phase() == Phase::kCollective) {
      const shm::MutexLock lock(mu_);
      launch->collective = collectives_++;
    }
    stream->enqueue(what, [launch] { run(*launch); });
  }
  if (!joined.empty()) {
    stream->enqueue("end of a NCCL group", [crossing] { crossing->leave(); });
  }
  for (const auto& other : joined) {
    other->enqueue("join of a NCCL group", [crossing] { crossing->await_leave(); });
  }
}

}  // namespace weightsync::emulator::nccl
