#include "wait.h"

#include <algorithm>
#include <utility>

namespace weightsync::shm {

bool Wait::poll() {
  Callbacks callbacks;
  {
    const MutexLock lock(mu_);
    if (outcome_) return true;
    std::optional<Status> outcome = look();
    if (!outcome) return false;
    callbacks = finish(*std::move(outcome));
  }
  for (const auto& callback : callbacks) callback();
  return true;
}

void Wait::complete(Status outcome) {
  Callbacks callbacks;
  {
    const MutexLock lock(mu_);
    if (outcome_) return;
    callbacks = finish(std::move(outcome));
  }
  for (const auto& callback : callbacks) callback();
}

Status Wait::outcome() const {
  const MutexLock lock(mu_);
  return outcome_.value_or(Status());
}

void Wait::on_finish(std::function<void()> callback) {
  {
    const MutexLock lock(mu_);
    if (!outcome_) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

void Wait::limit(Deadline deadline) {
  const MutexLock lock(mu_);
  deadline_ = std::min(deadline_, deadline);
}

Deadline Wait::deadline() const {
  const MutexLock lock(mu_);
  return deadline_;
}

std::optional<Status> Wait::look() const {
  if (std::optional<Status> outcome = check_()) return outcome;
  if (Clock::now() < deadline_) return std::nullopt;
  return Status(Code::kTimedOut, missing_());
}

Wait::Callbacks Wait::finish(Status outcome) {
  outcome_ = std::move(outcome);
  return std::exchange(callbacks_, {});
}

Status block_on(Wait& wait, Doorbell& bell) {
  const Doorbell::Waiting waiting(bell);
  for (;;) {
    const std::uint32_t seen = bell.count();
    if (wait.poll()) return wait.outcome();
    bell.wait(seen, wait.deadline());
  }
}

Status Waiter::add(const std::shared_ptr<Wait>& wait, std::shared_ptr<void> owner) {
  Result<bool> queued = enqueue(wait, std::move(owner));
  if (!queued.ok()) return queued.status();
  if (queued.value()) {
    bell_.ring();
  } else {
    wait->poll();
  }
  return {};
}

Result<bool> Waiter::enqueue(const std::shared_ptr<Wait>& wait,
                             std::shared_ptr<void> owner) {
  const MutexLock lock(mu_);
  if (stopping_) return false;
  if (!thread_.started()) {
    Status started = thread_.start([this, owner = std::move(owner)] { run(); });
    if (!started.ok()) return started;
  }
  waits_.push_back(wait);
  return true;
}

void Waiter::stop() {
  if (!origin_.is_here()) return;
  OwnedThread thread;
  {
    const MutexLock lock(mu_);
    stopping_ = true;
    thread = std::move(thread_);
  }
  bell_.ring();
  thread.join();
  poll_all();
}

bool Waiter::stopping() {
  const MutexLock lock(mu_);
  return stopping_;
}

void Waiter::run() {
  const Doorbell::Waiting waiting(bell_);
  for (;;) {
    const std::uint32_t seen = bell_.count();
    const Deadline next = poll_all();
    if (stopping()) return;
    bell_.wait(seen, next);
  }
}

Deadline Waiter::poll_all() {
  std::list<std::shared_ptr<Wait>> waits;
  {
    const MutexLock lock(mu_);
    waits = waits_;
  }
  Deadline next = Deadline::max();
  std::vector<std::shared_ptr<Wait>> finished;
  for (const auto& wait : waits) {
    if (wait->poll()) {
      finished.push_back(wait);
    } else {
      next = std::min(next, wait->deadline());
    }
  }
  const MutexLock lock(mu_);
  for (const auto& wait : finished) waits_.remove(wait);
  return next;
}

}  // namespace weightsync::shm
