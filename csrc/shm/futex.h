// Doorbell: a futex word in shared memory that wakes whoever waits for anything.
//
// One word per rank serves every condition: the ringer changes what it wants to tell,
// then rings; the waiter reads the word, looks at its condition, and sleeps only while
// the word is unchanged. No wake-up is lost and nothing polls. There is no spinning
// first: where other work wants the core, it made a wake-up many times slower.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>

namespace weightsync::shm {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

// This long from now; what the clock cannot express is never.
inline Deadline after(std::chrono::milliseconds duration) {
  const Deadline now = Clock::now();
  const auto longest =
      std::chrono::duration_cast<std::chrono::milliseconds>(Deadline::max() - now);
  return duration < longest ? now + duration : Deadline::max();
}

// Its bytes start as zeroes: fresh shared memory, or `Doorbell bell{}`.
class Doorbell {
 public:
  // Wakes all waiters. Everything written before is visible to whoever wakes.
  void ring() {
    count_.fetch_add(1, std::memory_order_seq_cst);
    if (waiters_.load(std::memory_order_seq_cst) > 0) wake();
  }

  // The number to hand to wait(); read it before looking at the condition.
  std::uint32_t count() const { return count_.load(std::memory_order_seq_cst); }

  // Sleeps until somebody rang after `seen` was read, or the deadline; may wake early.
  void wait(std::uint32_t seen, Deadline deadline) {
    const timespec until = to_timespec(deadline);
    const timespec* limit = deadline == Deadline::max() ? nullptr : &until;
    ::syscall(SYS_futex, word(), FUTEX_WAIT_BITSET, seen, limit, nullptr,
              FUTEX_BITSET_MATCH_ANY);
  }

  // Announces a waiter for as long as it lives; construct it before reading count().
  class Waiting {
   public:
    explicit Waiting(Doorbell& bell) : bell_(bell) {
      bell_.waiters_.fetch_add(1, std::memory_order_seq_cst);
    }
    ~Waiting() { bell_.waiters_.fetch_sub(1, std::memory_order_seq_cst); }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    Doorbell& bell_;
  };

 private:
  void wake() {
    ::syscall(SYS_futex, word(), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }

  std::uint32_t* word() { return reinterpret_cast<std::uint32_t*>(&count_); }

  static timespec to_timespec(Deadline deadline) {
    const auto since = deadline.time_since_epoch();
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(since);
    const auto rest =
        std::chrono::duration_cast<std::chrono::nanoseconds>(since - seconds);
    return {static_cast<time_t>(seconds.count()), static_cast<long>(rest.count())};
  }

  std::atomic<std::uint32_t> count_;
  std::atomic<std::uint32_t> waiters_;
};

static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

}  // namespace weightsync::shm
