#include "queued_stream.h"

#include <pthread.h>

#include <csignal>
#include <system_error>
#include <thread>
#include <utility>

namespace weightsync::emulator {
namespace {

using shm::Deadline;
using shm::Doorbell;
using shm::MutexLock;
using shm::Status;

thread_local QueuedStream* this_stream = nullptr;

// No signal handler of the program runs in a thread started while this lives.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_{};
};

}  // namespace

QueuedStream* running_stream() { return this_stream; }

CUstream_st* QueuedStream::handle() const {
  auto* const self = const_cast<QueuedStream*>(this);  // NOLINT: a handle, not access
  return reinterpret_cast<CUstream_st*>(self);
}

void QueuedStream::enqueue(std::string what, std::function<void()> run) {
  order_(*this, [&](std::vector<Point> before) {
    put({std::move(what), std::move(run), std::move(before)});
  });
}

// Waking the thread would cost more than the operation.
void QueuedStream::mark(std::string what, std::function<void()> run) {
  order_(*this, [&](std::vector<Point> before) {
    if (before.empty() && is_idle()) return run();
    put({std::move(what), std::move(run), std::move(before)});
  });
}

void QueuedStream::put(Operation operation) {
  Status started;
  {
    const MutexLock lock(mu_);
    queue_.push_back(std::move(operation));
    queued_ += 1;
    started = start_thread();
  }
  bell_.ring();
  if (!started.ok()) drop_all(started.message());
}

Status QueuedStream::start_thread() {
  if (started_) return {};
  const SignalsBlocked blocked;
  try {
    std::thread([self = shared_from_this()] { self->work(); }).detach();
  } catch (const std::system_error& error) {
    return shm::system_error("start the thread of " + traits_.name,
                             error.code().value());
  }
  started_ = true;
  return {};
}

void QueuedStream::drop_all(const std::string& reason) {
  std::deque<Operation> dropped;
  {
    const MutexLock lock(mu_);
    dropped.swap(queue_);
    done_ += dropped.size();
  }
  failed_(traits_.device, reason);
  bell_.ring();
}

void QueuedStream::work() {
  ::pthread_setname_np(::pthread_self(), "emulated stream");  // 15 are allowed
  this_stream = this;
  const Doorbell::Waiting waiting(bell_);
  for (;;) {
    const std::uint32_t seen = bell_.count();
    if (work_once()) continue;
    if (closed_ && is_idle()) return;
    bell_.wait(seen, Deadline::max());
  }
}

bool QueuedStream::work_once() {
  std::optional<Operation> operation = next();
  if (!operation) return false;
  carry_out(*operation);
  operation.reset();  // what it holds is gone before it counts as done
  {
    const MutexLock lock(mu_);
    running_.reset();
    done_ += 1;
  }
  bell_.ring();
  return true;
}

std::optional<QueuedStream::Operation> QueuedStream::next() {
  const MutexLock lock(mu_);
  if (queue_.empty()) return std::nullopt;
  Operation operation = std::move(queue_.front());
  queue_.pop_front();
  running_ = Running{operation.what, "", "", std::chrono::steady_clock::now()};
  return operation;
}

void QueuedStream::carry_out(const Operation& operation) {
  for (const Point& point : operation.before) {
    set_note(point.stream->name(), "");
    point.stream->wait_for(point.count);
  }
  if (!operation.before.empty()) set_note("", "");
  operation.run();
}

bool QueuedStream::is_idle() const { return done_ == queued_; }

std::optional<Point> QueuedStream::last_point() {
  const std::uint64_t count = queued_;
  if (done_ >= count) return std::nullopt;
  return Point{shared_from_this(), count};
}

void QueuedStream::wait_for(std::uint64_t count) {
  const Doorbell::Waiting waiting(bell_);
  for (;;) {
    const std::uint32_t seen = bell_.count();
    if (done_ >= count) return;
    bell_.wait(seen, Deadline::max());
  }
}

void QueuedStream::synchronize() { wait_for(queued_); }

void QueuedStream::close() {
  closed_ = true;
  bell_.ring();
}

std::optional<StreamReport> QueuedStream::report() {
  const MutexLock lock(mu_);
  if (is_idle()) return std::nullopt;
  StreamReport report;
  report.device = traits_.device;
  report.stream = traits_.name;
  report.queued = queue_.size();
  if (running_) {
    report.operation = running_->what;
    report.note = running_->note;
    report.call_site = running_->call_site;
    report.running = std::chrono::duration_cast<std::chrono::milliseconds>(
        std::chrono::steady_clock::now() - running_->since);
  }
  return report;
}

void QueuedStream::set_note(std::string note, std::string call_site) {
  const MutexLock lock(mu_);
  if (!running_) return;
  running_->note = std::move(note);
  running_->call_site = std::move(call_site);
}

}  // namespace weightsync::emulator
