// Serial: the one order in which the operations of a communicator run.
//
// It stands for NCCL's internal deviceStream: an operation starts only after the one
// before it ended, whatever their streams. Communicators that share resources
// (splitShare, shrinkShare) share a Serial. Any thread may call anything.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace weightsync::emulator::nccl {

class Serial {
 public:
  // An operation that has a place and has not ended. For diagnosis.
  struct Pending {
    std::uint64_t place = 0;
    std::string communicator;  // Communicator::describe()
    std::string operation;     // Operation::describe()
    std::string call_site;
    std::string missing;  // what it waits for now; empty while it does not run
    bool running = false;
  };

  // Held while places are taken and their operations go to a stream, so that the order
  // of places is the order of streams.
  std::mutex& launching() { return launching_; }

  // How many communicators share it.
  std::atomic<int>& communicators() { return communicators_; }

  // Taken by the host, in order of launches; whoever takes a place must end() it.
  std::uint64_t take(Pending pending);
  // Blocks until all places before this one have ended.
  void await_turn(std::uint64_t place);
  void end(std::uint64_t place);
  // Blocks until every place taken so far has ended.
  void drain();

  // The running operation waits for this; empty: no longer.
  void note(std::uint64_t place, std::string missing);
  // In order.
  std::vector<Pending> pending() const;

 private:
  std::mutex launching_;
  std::atomic<int> communicators_{0};

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::uint64_t taken_ = 0;
  std::map<std::uint64_t, Pending> pending_;
};

}  // namespace weightsync::emulator::nccl
