// lock_for: a mutex that is waited for with patience, and not for ever.
#pragma once

#include <chrono>
#include <mutex>
#include <thread>

#include "shm/futex.h"

namespace weightsync::nccl {

// Held if it became free in time. Not try_lock_for(): the thread sanitizer does not
// know what that calls.
inline std::unique_lock<std::timed_mutex> lock_for(std::timed_mutex& mutex,
                                                   std::chrono::milliseconds patience) {
  std::unique_lock<std::timed_mutex> lock(mutex, std::try_to_lock);
  const shm::Deadline limit = shm::after(patience);
  while (!lock.owns_lock() && shm::Clock::now() < limit) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    (void)lock.try_lock();
  }
  return lock;
}

}  // namespace weightsync::nccl
