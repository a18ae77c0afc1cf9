#include "backend/nccl/operation.h"

#include <ATen/core/jit_type.h>

#include <utility>

#include "backend/nccl/recording.h"
#include "backend/nccl/watchdog.h"

namespace weightsync {
namespace {

using shm::Code;
using shm::Status;

c10::IValue told(Operation::State state) {
  const auto result = state == Operation::State::kDone ? c10d::WorkResult::SUCCESS
                                                       : c10d::WorkResult::COMM_ERROR;
  return c10::IValue(static_cast<std::int64_t>(result));
}

std::uint64_t next_key() {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

}  // namespace

c10::Event timed_event() {
  return c10::Event(c10::DeviceType::CUDA, c10::EventFlag::BACKEND_DEFAULT);
}

Operation::Operation(std::shared_ptr<Session> session, Issued issued,
                     const c10::Stream& stream)
    : session_(std::move(session)),
      stream_(stream),
      name_(issued.name),
      sequence_(issued.sequence),
      captured_(issued.captured),
      timeout_(issued.timeout),
      begun_(std::chrono::steady_clock::now()),
      deadline_(shm::after(issued.timeout)),
      key_(next_key()),
      begin_(std::move(issued.begin)),
      timeouts_(std::move(issued.timeouts)),
      extension_(issued.extension),
      recorded_(std::move(issued.recorded)),
      kept_(std::move(issued.kept)),
      end_(begin_ ? timed_event() : session_->take_event()) {}

void Operation::mark_end() {
  try {
    const std::lock_guard<std::mutex> lock(mu_);
    end_->record(stream_);
  } catch (const std::exception& error) {
    finish(State::kFailed, {Code::kSystem, describe() + " failed: " + error.what()});
    throw;
  }
  // It has no end that could be seen: that it was issued is all there is to say.
  if (captured_) Recording::finish(recorded_, true);
}

std::string Operation::describe() const {
  return std::string(name_) + " (number " + std::to_string(sequence_) + ", rank " +
         std::to_string(session_->rank()) + " of " + std::to_string(session_->size()) +
         ")";
}

Status Operation::failure() const {
  const std::lock_guard<std::mutex> lock(mu_);
  return failure_;
}

Operation::State Operation::look() {
  if (const State known = state(); known != State::kPending) return known;
  State found = State::kPending;
  Status failure;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    if (!end_) return state();
    try {
      if (!captured_ && end_->query()) found = State::kDone;
    } catch (const std::exception& error) {
      failure = {Code::kSystem, describe() + " failed: " + error.what()};
      found = State::kFailed;
    }
    // After the query: an abort lets the event be reached without the data.
    if (found != State::kFailed && session_->failed()) {
      const Status why = session_->failure();
      failure = {why.code(), describe() + " was not finished: " + why.message()};
      found = State::kFailed;
    }
  }
  if (found == State::kPending) return found;
  finish(found, std::move(failure));
  return state();
}

void Operation::finish(State found, Status failure) {
  std::vector<at::Tensor> kept;
  std::optional<c10::Event> end;
  std::optional<float> milliseconds;
  c10::intrusive_ptr<c10::ivalue::Future> outcome;
  std::shared_ptr<Watchdog> watchdog;
  std::shared_ptr<Bell> bell;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    if (state() != State::kPending) return;
    failure_ = std::move(failure);
    end.swap(end_);
    outcome = outcome_;
    bell.swap(bell_);
    if (found == State::kDone) {
      // Dropping tensors and telling futures may take the GIL: not under the lock.
      kept.swap(kept_);
      watchdog = watchdog_.lock();
      if (begin_) {
        milliseconds_ = static_cast<float>(begin_->elapsedTime(*end));
        end.reset();
      }
      milliseconds = milliseconds_;
    }
    state_.store(found, std::memory_order_release);
  }
  Recording::finish(recorded_, found == State::kDone);
  if (found == State::kDone) {
    if (end) session_->give_back(std::move(*end));
    if (timeouts_) timeouts_->over(extension_);
    if (watchdog) watchdog->completed(key_, milliseconds);
  }
  if (outcome) outcome->markCompleted(told(found));
  if (bell) bell->ring();
}

void Operation::watched_by(std::weak_ptr<Watchdog> watchdog) {
  const std::lock_guard<std::mutex> lock(mu_);
  watchdog_ = std::move(watchdog);
}

void Operation::release() {
  std::vector<at::Tensor> kept;
  const std::lock_guard<std::mutex> lock(mu_);
  kept.swap(kept_);
}

void Operation::give_up(const Status& why) {
  std::shared_ptr<Watchdog> watchdog;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    watchdog = watchdog_.lock();
  }
  if (watchdog) watchdog->fail(session_, why);
}

float Operation::duration() const {
  const std::lock_guard<std::mutex> lock(mu_);
  TORCH_CHECK(begin_, describe(),
              ": its time was not taken; call _enable_collectives_timing() of the "
              "process group before");
  if (milliseconds_) return *milliseconds_;
  TORCH_CHECK(end_ && !session_->failed() && end_->query(), describe(),
              ": is not finished, so it has no duration");
  return static_cast<float>(begin_->elapsedTime(*end_));
}

void Operation::block(const c10::Stream& stream) {
  std::vector<at::Tensor> kept;
  const std::lock_guard<std::mutex> lock(mu_);
  // It may have ended meanwhile: then there is nothing to wait for.
  if (!end_) return;
  // What was issued on this stream itself comes before what follows anyway.
  if (stream != stream_) end_->block(stream);
  kept.swap(kept_);
}

void Operation::ring(const std::shared_ptr<Bell>& bell) {
  TORCH_CHECK(!captured_, describe(), ": is a part of a graph, and has no end");
  if (look() == State::kPending) {
    const std::lock_guard<std::mutex> lock(mu_);
    if (state() == State::kPending) {
      // A stream of its own: host functions hold up what comes after them.
      bell_ = bell;
      end_->block(session_->listener());
      Bell::ring_after(bell, session_->listener());
      return;
    }
  }
  bell->ring();
}

c10::intrusive_ptr<c10::ivalue::Future> Operation::outcome() {
  c10::intrusive_ptr<c10::ivalue::Future> asked;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    if (outcome_) return outcome_;
    outcome_ = c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
    asked = outcome_;
    if (state() == State::kPending) return asked;
  }
  asked->markCompleted(told(state()));
  return asked;
}

}  // namespace weightsync
