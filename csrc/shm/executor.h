// Executor: one thread that carries out copies in order, like a stream of a device.
//
// Submitting never blocks. A job that is cancelled stops between slices of 4 MiB. Any
// thread may call anything.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "annotations.h"
#include "copy.h"
#include "futex.h"
#include "owned_thread.h"
#include "status.h"

namespace weightsync::shm {

// A batch of copies and what follows it.
class Job {
 public:
  // `after` runs in the executor's thread when every byte is copied (a put signals
  // there); `done` runs last, with the outcome of both. Both are dropped with what they
  // hold as soon as they ran, however long the Job is kept.
  Job(std::vector<Run> runs, std::size_t nbytes, std::function<Status()> after,
      std::function<void(Status)> done)
      : runs_(std::move(runs)),
        nbytes_(nbytes),
        after_(std::move(after)),
        done_(std::move(done)) {}

  // Stops the copy soon, unless it is through; `after` is then not run.
  void cancel() { cancelled_ = true; }

  // Carries the job out on the calling thread; once.
  void run();

 private:
  const std::vector<Run> runs_;
  const std::size_t nbytes_;
  std::atomic<bool> cancelled_{false};

  // Touched only by run().
  std::function<Status()> after_;
  std::function<void(Status)> done_;
};

class Executor {
 public:
  Executor() = default;
  ~Executor() { stop(); }
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // `owner` is what holds this Executor; the thread keeps it alive. Without a thread to
  // be had, and after stop(), the job runs here and now; after stop() as cancelled.
  void submit(const std::shared_ptr<Job>& job, std::shared_ptr<void> owner);

  // The same, but on the calling thread if nothing is queued: saves two thread
  // switches. From within a job too, which would wait for itself otherwise.
  void run_or_submit(const std::shared_ptr<Job>& job);

  // Cancels everything and ends the thread. When it returns no job writes any more,
  // except one that called it. Idempotent. Call it without the GIL. Does nothing in a
  // forked child.
  void stop();

 private:
  // A job on the thread that brought it.
  struct Inline {
    Job* job;
    std::thread::id thread;
  };

  bool queue(const std::shared_ptr<Job>& job, std::shared_ptr<void> owner);
  // Whether the calling thread has to run the job: nothing is ahead of it.
  bool begin_inline(const std::shared_ptr<Job>& job);
  bool end_inline(const Job* job);
  bool others_run_inline();
  void run();
  struct Next {
    std::shared_ptr<Job> job;  // null if there is none
    bool ended;                // and there will be none
  };
  Next next();
  std::shared_ptr<Job> pop();

  const Origin origin_;
  // Rung when a job is queued, when one ends inline, and to stop. Not a condition
  // variable: to destroy one hangs in a forked child whose parent's thread waits on it.
  Doorbell changed_{};

  Mutex mu_;
  // The front one runs.
  std::deque<std::shared_ptr<Job>> jobs_ WEIGHTSYNC_GUARDED_BY(mu_);
  std::vector<Inline> inline_ WEIGHTSYNC_GUARDED_BY(mu_);
  bool stopping_ WEIGHTSYNC_GUARDED_BY(mu_) = false;
  std::thread::id runner_ WEIGHTSYNC_GUARDED_BY(mu_);  // of the thread
  OwnedThread thread_ WEIGHTSYNC_GUARDED_BY(mu_);
};

}  // namespace weightsync::shm
