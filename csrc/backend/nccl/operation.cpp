#include "backend/nccl/operation.h"

#include <ATen/core/jit_type.h>

#include <utility>

namespace weightsync {
namespace {

using shm::Code;
using shm::Status;

c10::IValue told(Operation::State state) {
  const auto result = state == Operation::State::kDone ? c10d::WorkResult::SUCCESS
                                                       : c10d::WorkResult::COMM_ERROR;
  return c10::IValue(static_cast<std::int64_t>(result));
}

}  // namespace

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
      kept_(std::move(issued.kept)),
      end_(session_->take_event()) {
  end_->record(stream_);
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
    // Under the lock: who fails the session looks at all operations before the abort,
    // which lets the event be reached without the data.
    const bool failed = session_->failed();
    try {
      if (!captured_ && end_->query()) found = State::kDone;
    } catch (const std::exception& error) {
      failure = {Code::kSystem, describe() + " failed: " + error.what()};
      found = State::kFailed;
    }
    if (found == State::kPending && failed) {
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
  c10::intrusive_ptr<c10::ivalue::Future> outcome;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    if (state() != State::kPending) return;
    failure_ = std::move(failure);
    // Dropping tensors and telling futures may take the GIL: not under the lock.
    kept.swap(kept_);
    end.swap(end_);
    outcome = outcome_;
    state_.store(found, std::memory_order_release);
  }
  if (end && found == State::kDone) session_->give_back(std::move(*end));
  if (outcome) outcome->markCompleted(told(found));
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
