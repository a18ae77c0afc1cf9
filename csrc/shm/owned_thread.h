// OwnedThread: a thread that can always be ended, also from itself and after a fork.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <functional>
#include <thread>
#include <utility>

namespace weightsync::shm {

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

  void start(std::function<void()> run) {
    pid_ = ::getpid();
    thread_ = std::thread(std::move(run));
  }

  bool started() const { return thread_.joinable(); }

  // Waits for the end. A thread cannot wait for itself, and a forked child does not have
  // its parent's threads: both only let go.
  void join() {
    if (!thread_.joinable()) return;
    if (pid_ != ::getpid() || thread_.get_id() == std::this_thread::get_id()) {
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
