#include "work_shm.h"

#include <ATen/core/ivalue_inl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>

#include "status_error.h"

namespace weightsync {

EventFd::EventFd() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (fd_ < 0) throw StatusError(shm::system_error("create an eventfd", errno));
}

EventFd::~EventFd() { ::close(fd_); }

void EventFd::notify() const {
  const std::uint64_t one = 1;
  (void)!::write(fd_, &one, sizeof one);
}

WorkShm::WorkShm(int rank, c10d::OpType type, std::shared_ptr<shm::Group> group,
                 std::shared_ptr<shm::Wait> wait, std::shared_ptr<shm::Job> job)
    : Work(rank, type),
      group_(std::move(group)),
      wait_(std::move(wait)),
      job_(std::move(job)) {}

bool WorkShm::isCompleted() { return wait_->poll(); }

bool WorkShm::isSuccess() const { return wait_->poll() && wait_->outcome().ok(); }

std::exception_ptr WorkShm::exception() const {
  const shm::Status outcome = wait_->outcome();
  return outcome.ok() ? nullptr : std::make_exception_ptr(StatusError(outcome));
}

bool WorkShm::wait(std::chrono::milliseconds timeout) {
  if (timeout > kNoTimeout) {
    wait_->limit(shm::after(timeout));
    group_->wake();  // threads that sleep until the old deadline
  }
  const shm::Status outcome = group_->block(*wait_);
  if (outcome.code() == shm::Code::kTimedOut && job_) job_->cancel();
  check(outcome);
  return true;
}

void WorkShm::abort() {
  // A put finishes through its job, so that nobody takes its sources away while it
  // copies.
  if (job_) {
    job_->cancel();
  } else {
    wait_->complete({shm::Code::kCancelled, "the operation was given up"});
    group_->wake();
  }
}

c10::intrusive_ptr<c10::ivalue::Future> WorkShm::getFuture() {
  {
    const std::lock_guard<std::mutex> lock(mu_);
    if (future_) return future_;
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()));
  }
  wait_->on_finish([future = future_, wait = wait_] {
    const shm::Status outcome = wait->outcome();
    if (outcome.ok()) {
      future->markCompleted(c10::IValue(std::vector<at::Tensor>()));
    } else {
      future->setError(std::make_exception_ptr(StatusError(outcome)));
    }
  });
  check(group_->start(wait_));
  return future_;
}

c10::intrusive_ptr<c10::ivalue::Future> WorkShm::getFutureResult() {
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
  wait_->on_finish([future, wait = wait_] {
    const shm::Code code = wait->outcome().code();
    const auto result = code == shm::Code::kOk         ? c10d::WorkResult::SUCCESS
                        : code == shm::Code::kTimedOut ? c10d::WorkResult::TIMEOUT
                                                       : c10d::WorkResult::COMM_ERROR;
    future->markCompleted(c10::IValue(static_cast<std::int64_t>(result)));
  });
  check(group_->start(wait_));
  return future;
}

int WorkShm::fileno() {
  std::shared_ptr<EventFd> event;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    if (event_) return event_->fd();
    event = event_ = std::make_shared<EventFd>();
  }
  wait_->on_finish([event] { event->notify(); });
  check(group_->start(wait_));
  return event->fd();
}

}  // namespace weightsync
