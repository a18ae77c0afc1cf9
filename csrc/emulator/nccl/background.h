// Background: the thread that carries out a nonblocking group.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>

#include "shm/futex.h"
#include "shm/owned_thread.h"
#include "shm/status.h"

namespace weightsync::emulator::nccl {

// Shared by the communicators of the group and by the thread itself. Any thread may
// call anything.
class Background : public std::enable_shared_from_this<Background> {
 public:
  // Once. `run` gets called on the thread, or here if there can be no thread.
  void start(std::function<void()> run);
  bool finished() const { return finished_.load(std::memory_order_acquire); }
  // Blocks until finished; at once on the thread itself.
  void join();

 private:
  shm::Doorbell done_{};
  std::atomic<bool> finished_{false};
  std::atomic<std::thread::id> runner_{};

  std::mutex mutex_;
  shm::OwnedThread thread_;  // guarded by mutex_
};

}  // namespace weightsync::emulator::nccl
