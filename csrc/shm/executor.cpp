#include "executor.h"

#include <algorithm>

namespace weightsync::shm {

void Job::run() {
  const auto after = std::move(after_);
  const auto done = std::move(done_);
  if (!copy_runs(runs_, useful_threads(nbytes_), cancelled_) || cancelled_) {
    return done({Code::kCancelled, "the copy was cancelled"});
  }
  done(after ? after() : Status());
}

void Executor::submit(const std::shared_ptr<Job>& job, std::shared_ptr<void> owner) {
  if (queue(job, std::move(owner))) {
    changed_.ring();
  } else {
    job->run();
  }
}

bool Executor::queue(const std::shared_ptr<Job>& job, std::shared_ptr<void> owner) {
  const MutexLock lock(mu_);
  if (stopping_) {
    job->cancel();
    return false;
  }
  if (!thread_.started()) {
    const Status started = thread_.start([this, owner = std::move(owner)] { run(); });
    if (!started.ok()) return false;
  }
  jobs_.push_back(job);
  return true;
}

void Executor::run_or_submit(const std::shared_ptr<Job>& job) {
  if (!begin_inline(job)) return changed_.ring();
  job->run();
  // Only stop() waits for it; the thread sleeps on.
  if (end_inline(job.get())) changed_.ring();
}

bool Executor::begin_inline(const std::shared_ptr<Job>& job) {
  const MutexLock lock(mu_);
  if (stopping_) job->cancel();
  const bool queued = !jobs_.empty() && runner_ != std::this_thread::get_id();
  if (queued && !stopping_) {
    jobs_.push_back(job);
    return false;
  }
  inline_.push_back({job.get(), std::this_thread::get_id()});
  return true;
}

bool Executor::end_inline(const Job* job) {
  const MutexLock lock(mu_);
  const auto entry = std::find_if(inline_.begin(), inline_.end(),
                                  [job](const Inline& one) { return one.job == job; });
  inline_.erase(entry);
  return stopping_;
}

bool Executor::others_run_inline() {
  const MutexLock lock(mu_);
  return std::any_of(inline_.begin(), inline_.end(), [](const Inline& one) {
    return one.thread != std::this_thread::get_id();
  });
}

void Executor::stop() {
  if (!origin_.is_here()) return;
  OwnedThread thread;
  {
    const MutexLock lock(mu_);
    stopping_ = true;
    for (const auto& job : jobs_) job->cancel();
    for (const Inline& one : inline_) one.job->cancel();
    thread = std::move(thread_);
  }
  changed_.ring();
  thread.join();
  const Doorbell::Waiting waiting(changed_);
  for (;;) {
    const std::uint32_t seen = changed_.count();
    if (!others_run_inline()) return;
    changed_.wait(seen, Deadline::max());
  }
}

void Executor::run() {
  const Doorbell::Waiting waiting(changed_);
  for (;;) {
    const std::uint32_t seen = changed_.count();
    Next found = next();
    if (found.ended) return;
    if (!found.job) {
      changed_.wait(seen, Deadline::max());
      continue;
    }
    found.job->run();
    found.job.reset();
    pop();  // may drop tensors, and so want the GIL: not under the lock
  }
}

Executor::Next Executor::next() {
  const MutexLock lock(mu_);
  runner_ = std::this_thread::get_id();
  if (jobs_.empty()) return {nullptr, stopping_};
  return {jobs_.front(), false};
}

std::shared_ptr<Job> Executor::pop() {
  const MutexLock lock(mu_);
  std::shared_ptr<Job> finished = std::move(jobs_.front());
  jobs_.pop_front();
  return finished;
}

}  // namespace weightsync::shm
