#include "executor.h"

namespace weightsync::shm {

void Job::run() {
  if (!copy_runs(runs_, useful_threads(nbytes_), cancelled_) || cancelled_) {
    return done_({Code::kCancelled, "the copy was cancelled"});
  }
  done_(after_ ? after_() : Status());
}

void Executor::submit(const std::shared_ptr<Job>& job, std::shared_ptr<void> owner) {
  {
    const std::lock_guard<std::mutex> lock(mu_);
    if (!stopping_) {
      jobs_.push_back(job);
      if (!thread_.started()) {
        thread_.start([this, owner = std::move(owner)] { run(); });
      }
      changed_.notify_one();
      return;
    }
  }
  job->cancel();
  job->run();
}

void Executor::run_or_submit(const std::shared_ptr<Job>& job) {
  {
    const std::lock_guard<std::mutex> lock(mu_);
    if (!jobs_.empty()) {
      jobs_.push_back(job);
      changed_.notify_one();
      return;
    }
  }
  job->run();
}

void Executor::stop() {
  OwnedThread thread;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    stopping_ = true;
    for (const auto& job : jobs_) job->cancel();
    thread = std::move(thread_);
    changed_.notify_all();
  }
  thread.join();
}

void Executor::run() {
  std::unique_lock<std::mutex> lock(mu_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    std::shared_ptr<Job> job = jobs_.front();
    lock.unlock();
    job->run();
    job.reset();
    lock.lock();
    std::shared_ptr<Job> finished = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    finished.reset();  // may drop tensors, and so want the GIL
    lock.lock();
  }
}

}  // namespace weightsync::shm
