// Diagnosis: what would hang in silence on hardware ends here with a report.
//
// Whoever blocks, a stream or the host, holds a Guard while it does:
//
//   diagnosis::Guard guard(communicator, "for rank 3 to call ncclAllReduce");
//   while (!condition()) sleep();
//
// One thread of the process watches all guards. If one of them makes no progress for
// WEIGHTSYNC_EMULATOR_HANG_SECONDS (60; 0 is never), it prints once who waits for what,
// since when and from which call site, and what the other ranks do as far as their
// control segments tell, and ends the process with kHangExitCode, without running
// destructors or exit handlers: the blocked threads would need them.
#pragma once

#include <chrono>
#include <functional>
#include <list>
#include <string>
#include <vector>

namespace weightsync::emulator::nccl {

class Communicator;

namespace diagnosis {

inline constexpr int kHangExitCode = 86;

// Somebody who is blocked, in words that are asked for only when there is a report, by
// another thread than the blocked one.
struct Blocked {
  std::function<std::string()> who;   // "rank 2 of 4 (communicator 1f3a, device 2)"
  std::function<std::string()> what;  // in which call, and for what it waits
  // What else is known: what waits behind it, and what the other ranks do.
  std::function<std::vector<std::string>()> context;
  // Tells the other ranks; an empty text if it is over. May be empty.
  std::function<void(const std::string& text)> publish;
  // Whether nobody waits for it any more: the report comes once, and ends nothing. May
  // be empty, which is never.
  std::function<bool()> apart = nullptr;
};

// Not movable: the watcher knows its address. Everything it was given must live as
// long, and must not be waiting for a lock that the blocked thread holds.
class Guard {
 public:
  // `missing` says for what it waits; the call comes from the stream's operation or, on
  // the host, from the API call that the thread is in.
  Guard(Communicator& communicator, std::string missing);
  Guard(Communicator& communicator, std::function<std::string()> missing);
  explicit Guard(Blocked blocked);
  ~Guard();
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  // Something moved: the time starts anew.
  void progress();

 private:
  friend class Watcher;
  class Watcher& watcher_;
  const Blocked blocked_;

  // Guarded by the watcher's lock.
  std::chrono::steady_clock::time_point since_;
  bool published_ = false;
  bool told_ = false;  // that it is set apart
  std::list<Guard*>::iterator place_;
};

// What a communicator knows about itself and its peers.
Blocked describe(Communicator& communicator, std::function<std::string()> missing);

// The limit, from the environment; zero if there is none.
std::chrono::milliseconds limit_of_environment();

// Prints the lines on stderr, each marked as the emulator's, and ends the process.
[[noreturn]] void end_process(const std::vector<std::string>& lines);

}  // namespace diagnosis
}  // namespace weightsync::emulator::nccl
