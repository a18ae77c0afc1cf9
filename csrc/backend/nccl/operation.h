// Operation: what runs on a stream, from its issue to its end. The watchdog looks at
// it.
//
// It is over when its end event is reached, or when its session failed before. Until
// then, or until somebody's stream waits for it, it keeps the tensors alive that they
// may have dropped; if it failed, until its watchdog releases them. It keeps nothing
// else of theirs, so whoever has it costs no memory. Any thread may call anything;
// nothing here is called with a lock held by the caller.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backend/nccl/bell.h"
#include "backend/nccl/session.h"
#include "backend/nccl/timeouts.h"
#include "recorder/recorder.h"
#include "shm/futex.h"

namespace weightsync {

class Watchdog;

// What is known of an operation when it is issued.
struct Issued {
  c10d::OpType type = c10d::OpType::UNKNOWN;
  const char* name = "an operation";
  std::uint64_t sequence = 0;
  // Alive until it is over, or until a stream waits for it. Nothing is needed here for
  // what runs on the stream of the caller.
  std::vector<at::Tensor> kept;
  std::vector<at::Tensor> results;  // what result() and the future give
  std::chrono::milliseconds timeout{0};
  bool blocks_host = false;  // wait() waits for the end and not only its stream
  bool captured = false;     // into a graph: it has no end that could be asked for
  std::optional<c10::Event> begin;     // with its time, if that is to be known
  std::shared_ptr<Timeouts> timeouts;  // for the extension, if there is one
  std::chrono::milliseconds extension{0};
  std::vector<recorder::Ticket> recorded;
};

// An event that knows its time.
c10::Event timed_event();

class Operation {
 public:
  enum class State : std::uint8_t { kPending, kDone, kFailed };

  // It was issued on `stream`, where mark_end() is called next, before all else. Calls
  // nothing of CUDA.
  Operation(std::shared_ptr<Session> session, Issued issued, const c10::Stream& stream);
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // Its end is here. Raises what CUDA says: then it has failed, and keeps the tensors.
  void mark_end();
  void watched_by(std::weak_ptr<Watchdog> watchdog);
  // Asks the event, if it has to. Once it is over, the outcome is told, and if it ended
  // well it has let go of the tensors.
  State look();
  // Whether it is over.
  bool collect() { return look() != State::kPending; }
  // What was seen last.
  State state() const { return state_.load(std::memory_order_acquire); }
  bool isSuccess() const { return state() == State::kDone; }
  // Lets go of the tensors of a failed one.
  void release();
  // Ends its session.
  void give_up(const shm::Status& why);
  // Why it failed; ok if it did not.
  shm::Status failure() const;

  // Lets a stream wait for the end, which the caller's tensors are safe with then.
  void block(const c10::Stream& stream);
  // Rings the bell at the end, however it ends, or now: CUDA does where it ends well.
  void ring(const std::shared_ptr<Bell>& bell);
  // Told a WorkResult at the end, or now.
  c10::intrusive_ptr<c10::ivalue::Future> outcome();

  // In milliseconds, where the time was taken. Raises otherwise, and before the end.
  float duration() const;
  // No other operation has it.
  std::uint64_t key() const { return key_; }
  // "all_reduce (number 7, rank 0 of 2)": for messages.
  std::string describe() const;
  Session& session() const { return *session_; }
  const std::shared_ptr<Session>& share_session() const { return session_; }
  const c10::Stream& stream() const { return stream_; }
  shm::Deadline deadline() const { return deadline_; }
  std::chrono::milliseconds getTimeout() const { return timeout_; }
  std::uint64_t sequence() const { return sequence_; }
  bool captured() const { return captured_; }
  std::chrono::steady_clock::time_point begun() const { return begun_; }

 private:
  void finish(State state, shm::Status failure);

  // Constant after construction.
  const std::shared_ptr<Session> session_;
  const c10::Stream stream_;
  const char* const name_;
  const std::uint64_t sequence_;
  const bool captured_;
  const std::chrono::milliseconds timeout_;
  const std::chrono::steady_clock::time_point begun_;
  const shm::Deadline deadline_;
  const std::uint64_t key_;
  const std::optional<c10::Event> begin_;
  const std::shared_ptr<Timeouts> timeouts_;
  const std::chrono::milliseconds extension_;
  const std::vector<recorder::Ticket> recorded_;

  std::atomic<State> state_{State::kPending};

  mutable std::mutex mu_;
  std::vector<at::Tensor> kept_;                     // guarded by mu_
  std::weak_ptr<Watchdog> watchdog_;                 // guarded by mu_
  std::optional<c10::Event> end_;                    // guarded by mu_
  std::shared_ptr<Bell> bell_;                       // guarded by mu_
  std::optional<float> milliseconds_;                // guarded by mu_
  shm::Status failure_;                              // guarded by mu_
  c10::intrusive_ptr<c10::ivalue::Future> outcome_;  // guarded by mu_
};

}  // namespace weightsync
