// Mutex and MutexLock: std::mutex that clang's -Wthread-safety can follow.
//
// clang-tidy proves with them that what is GUARDED_BY a lock is touched only under it.
// Other compilers see an ordinary mutex.
#pragma once

#include <mutex>

#if defined(__clang__)
#define WEIGHTSYNC_THREAD(attribute) __attribute__((attribute))
#else
#define WEIGHTSYNC_THREAD(attribute)
#endif

#define WEIGHTSYNC_GUARDED_BY(mutex) WEIGHTSYNC_THREAD(guarded_by(mutex))
#define WEIGHTSYNC_REQUIRES(mutex) WEIGHTSYNC_THREAD(requires_capability(mutex))
#define WEIGHTSYNC_EXCLUDES(mutex) WEIGHTSYNC_THREAD(locks_excluded(mutex))

namespace weightsync::shm {

class WEIGHTSYNC_THREAD(capability("mutex")) Mutex {
 public:
  void lock() WEIGHTSYNC_THREAD(acquire_capability()) { mutex_.lock(); }
  void unlock() WEIGHTSYNC_THREAD(release_capability()) { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

class WEIGHTSYNC_THREAD(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) WEIGHTSYNC_THREAD(acquire_capability(mutex))
      : mutex_(mutex) {
    mutex_.lock();
  }
  ~MutexLock() WEIGHTSYNC_THREAD(release_capability()) { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

}  // namespace weightsync::shm
