#include "wait.h"

#include <algorithm>

namespace weightsync::shm {

bool Wait::poll() {
  std::unique_lock<std::mutex> lock(mu_);
  if (outcome_) return true;
  if (std::optional<Status> outcome = check_()) {
    return finish(std::move(lock), *std::move(outcome));
  }
  if (Clock::now() < deadline_) return false;
  return finish(std::move(lock), {Code::kTimedOut, missing_()});
}

void Wait::complete(Status outcome) {
  std::unique_lock<std::mutex> lock(mu_);
  if (!outcome_) finish(std::move(lock), std::move(outcome));
}

Status Wait::outcome() const {
  const std::lock_guard<std::mutex> lock(mu_);
  return outcome_.value_or(Status());
}

void Wait::on_finish(std::function<void()> callback) {
  {
    const std::lock_guard<std::mutex> lock(mu_);
    if (!outcome_) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

void Wait::limit(Deadline deadline) {
  const std::lock_guard<std::mutex> lock(mu_);
  deadline_ = std::min(deadline_, deadline);
}

Deadline Wait::deadline() const {
  const std::lock_guard<std::mutex> lock(mu_);
  return deadline_;
}

bool Wait::finish(std::unique_lock<std::mutex> lock, Status outcome) {
  outcome_ = std::move(outcome);
  const std::vector<std::function<void()>> callbacks = std::move(callbacks_);
  lock.unlock();
  for (const auto& callback : callbacks) callback();
  return true;
}

Status block_on(Wait& wait, Doorbell& bell) {
  const Doorbell::Waiting waiting(bell);
  for (;;) {
    const std::uint32_t seen = bell.count();
    if (wait.poll()) return wait.outcome();
    bell.wait(seen, wait.deadline());
  }
}

void Waiter::add(const std::shared_ptr<Wait>& wait, std::shared_ptr<void> owner) {
  {
    const std::lock_guard<std::mutex> lock(mu_);
    waits_.push_back(wait);
    if (!stopping_ && !thread_.started()) {
      thread_.start([this, owner = std::move(owner)] { run(); });
    }
    if (!stopping_) return bell_.ring();
  }
  poll_all();
}

void Waiter::stop() {
  OwnedThread thread;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    stopping_ = true;
    thread = std::move(thread_);
  }
  bell_.ring();
  thread.join();
  poll_all();
}

void Waiter::run() {
  const Doorbell::Waiting waiting(bell_);
  for (;;) {
    const std::uint32_t seen = bell_.count();
    const Deadline next = poll_all();
    {
      const std::lock_guard<std::mutex> lock(mu_);
      if (stopping_) return;
    }
    bell_.wait(seen, next);
  }
}

Deadline Waiter::poll_all() {
  std::list<std::shared_ptr<Wait>> waits;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    waits = waits_;
  }
  Deadline next = Deadline::max();
  std::vector<std::shared_ptr<Wait>> finished;
  for (auto& wait : waits) {
    if (wait->poll()) {
      finished.push_back(wait);
    } else {
      next = std::min(next, wait->deadline());
    }
  }
  const std::lock_guard<std::mutex> lock(mu_);
  for (const auto& wait : finished) waits_.remove(wait);
  return next;
}

}  // namespace weightsync::shm
