// Executor: one thread that carries out copies in order, like a stream of a device.
//
// Submitting never blocks. A job that is cancelled stops between slices of 4 MiB. Any
// thread may call anything.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "copy.h"
#include "owned_thread.h"
#include "status.h"

namespace weightsync::shm {

// A batch of copies and what follows it.
class Job {
 public:
  // `after` runs in the executor's thread when every byte is copied (a put signals
  // there); `done` runs last, with the outcome of both.
  Job(std::vector<Run> runs, std::size_t nbytes, std::function<Status()> after,
      std::function<void(Status)> done)
      : runs_(std::move(runs)),
        nbytes_(nbytes),
        after_(std::move(after)),
        done_(std::move(done)) {}

  // Stops the copy soon, unless it is through; `after` is then not run.
  void cancel() { cancelled_ = true; }

  // Carries the job out on the calling thread.
  void run();

 private:
  const std::vector<Run> runs_;
  const std::size_t nbytes_;
  const std::function<Status()> after_;
  const std::function<void(Status)> done_;
  std::atomic<bool> cancelled_{false};
};

class Executor {
 public:
  Executor() = default;
  ~Executor() { stop(); }
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // `owner` is what holds this Executor; the thread keeps it alive.
  void submit(const std::shared_ptr<Job>& job, std::shared_ptr<void> owner);

  // The same, but on the calling thread if nothing is queued: saves two thread switches.
  void run_or_submit(const std::shared_ptr<Job>& job);

  // Cancels everything and ends the thread. Idempotent. Call it without the GIL.
  void stop();

 private:
  void run();

  std::mutex mu_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> jobs_;  // guarded by mu_; the front one runs
  bool stopping_ = false;                  // guarded by mu_
  OwnedThread thread_;                     // guarded by mu_
};

}  // namespace weightsync::shm
