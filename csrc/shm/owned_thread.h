// OwnedThread: a thread that can always be ended, also from itself and after a fork.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <functional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "status.h"

namespace weightsync::shm {

// Where an object was made. A forked child inherits its bytes, but neither its threads
// nor the right to speak for it; a lock in it may be held by a thread that is not
// there.
class Origin {
 public:
  bool is_here() const { return pid_ == ::getpid(); }

 private:
  const pid_t pid_ = ::getpid();
};

class OwnedThread {
 public:
  OwnedThread() = default;
  ~OwnedThread() { join(); }
  OwnedThread(OwnedThread&& other) noexcept
      : thread_(std::move(other.thread_)), pid_(other.pid_) {}
  OwnedThread& operator=(OwnedThread&& other) noexcept {
    join();
    thread_ = std::move(other.thread_);
    pid_ = other.pid_;
    return *this;
  }

  Status start(std::function<void()> run) {
    pid_ = ::getpid();
    try {
      thread_ = std::thread(std::move(run));
    } catch (const std::system_error& error) {
      return system_error("start a thread", error.code().value());
    }
    return {};
  }

  bool started() const { return thread_.joinable(); }

  // Waits for the end. A thread cannot wait for itself, and a forked child does not
  // have its parent's threads: both only let go.
  void join() {
    if (!thread_.joinable()) return;
    if (pid_ != ::getpid()) {
      // Not even detached: a thread of the child may have got the same pthread_t. The
      // child loses a few bytes.
      // Leaked on purpose: see above.
      new std::thread(std::move(thread_));  // NOLINT(bugprone-unused-raii)
    } else if (thread_.get_id() == std::this_thread::get_id()) {
      thread_.detach();
    } else {
      thread_.join();
    }
  }

 private:
  std::thread thread_;
  pid_t pid_ = 0;
};

}  // namespace weightsync::shm
