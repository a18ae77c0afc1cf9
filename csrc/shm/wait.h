// Wait: one condition that somebody waits for, finished exactly once.
//
// Whoever notices first finishes it: a caller that blocks, the waiter thread, or a
// cancellation. Any thread may call anything here.
#pragma once

#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "annotations.h"
#include "futex.h"
#include "owned_thread.h"
#include "status.h"

namespace weightsync::shm {

class Wait {
 public:
  // Looks at the condition: nothing while it is open, else its outcome. What a check
  // takes (signals), it takes only when it succeeds.
  using Check = std::function<std::optional<Status>()>;
  // Says what is still missing, for the message of a timeout.
  using Missing = std::function<std::string()>;

  Wait(Check check, Missing missing, Deadline deadline)
      : check_(std::move(check)), missing_(std::move(missing)), deadline_(deadline) {}

  // Looks once; true when finished.
  bool poll();

  // Finishes with this outcome unless finished already; the check takes nothing then.
  // Ring the doorbell afterwards: a thread may sleep in block_on(). The same for
  // limit().
  void complete(Status outcome);

  // The outcome; ok while unfinished.
  Status outcome() const;

  // Calls back once when finished, from the thread that finishes it, or at once.
  void on_finish(std::function<void()> callback);

  // Brings the deadline forward, never back.
  void limit(Deadline deadline);

  Deadline deadline() const;

 private:
  using Callbacks = std::vector<std::function<void()>>;

  // The outcome that a look at condition and clock gives now, if any.
  std::optional<Status> look() const WEIGHTSYNC_REQUIRES(mu_);
  // What to call once the lock is free.
  Callbacks finish(Status outcome) WEIGHTSYNC_REQUIRES(mu_);

  // Constant after construction.
  const Check check_;
  const Missing missing_;

  mutable Mutex mu_;
  Deadline deadline_ WEIGHTSYNC_GUARDED_BY(mu_);
  std::optional<Status> outcome_ WEIGHTSYNC_GUARDED_BY(mu_);
  Callbacks callbacks_ WEIGHTSYNC_GUARDED_BY(mu_);
};

// Blocks the calling thread until the wait is finished. Whatever finishes it from
// another thread, other than its check, has to ring `bell`.
Status block_on(Wait& wait, Doorbell& bell);

// A thread that polls waits whenever the doorbell rings; started with the first wait.
// Idle, it costs nothing: it sleeps on the doorbell.
class Waiter {
 public:
  explicit Waiter(Doorbell& bell) : bell_(bell) {}
  ~Waiter() { stop(); }
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;

  // `owner` is what holds this Waiter and its doorbell; the thread keeps it alive.
  // Fails only if there can be no thread; the wait is not polled then.
  Status add(const std::shared_ptr<Wait>& wait, std::shared_ptr<void> owner);

  // Polls everything once more and ends the thread. Idempotent. Call it without any
  // lock that a callback may want (the GIL included). Does nothing in a forked child.
  void stop();

 private:
  // Queues the wait for the thread, starting it; true unless stop() was called.
  Result<bool> enqueue(const std::shared_ptr<Wait>& wait, std::shared_ptr<void> owner);
  void run();
  bool stopping();
  // Polls everything once; the earliest deadline of what is left.
  Deadline poll_all();

  Doorbell& bell_;
  const Origin origin_;

  Mutex mu_;
  std::list<std::shared_ptr<Wait>> waits_ WEIGHTSYNC_GUARDED_BY(mu_);
  bool stopping_ WEIGHTSYNC_GUARDED_BY(mu_) = false;
  OwnedThread thread_ WEIGHTSYNC_GUARDED_BY(mu_);
};

}  // namespace weightsync::shm
