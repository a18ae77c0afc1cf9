// WorkNccl: what the caller of an operation gets, or of a batch of them.
//
// Any thread may call anything.
#pragma once

#include <torch/version.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "backend/nccl/operation.h"

namespace weightsync {

class WorkNccl : public c10d::Work {
 public:
  // As an operation is made: mark_end() of that comes next.
  WorkNccl(std::shared_ptr<Session> session, Issued issued, const c10::Stream& stream);
  ~WorkNccl() override;

  bool isCompleted() override { return operation_->collect(); }
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  // Lets the current stream wait for the end. Lets the host wait if a timeout is given,
  // or if the group is so configured. If that passes it raises, and the session ends:
  // the ranks no longer agree on what is done.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  void blockCurrentStream() override { wait(); }
  void abort() override;
  // A descriptor that is readable from the moment this work is over; owned by it. The
  // host is told by CUDA, and asks nobody again and again.
  int fileno();
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override {
    return operation_->outcome();
  }
  std::uint64_t getSequencenumber() const override { return operation_->sequence(); }
  std::chrono::milliseconds getTimeout() const override {
    return operation_->getTimeout();
  }

  // In milliseconds, where the group was told to take the time. Raises otherwise, and
  // before the end.
  float getDuration() const override { return operation_->duration(); }
#if TORCH_VERSION_MINOR >= 15
  std::uint64_t getCompletionKey() const override { return operation_->key(); }
#endif

  const std::shared_ptr<Operation>& operation() const { return operation_; }

 private:
  void wait_on_host(shm::Deadline deadline, std::chrono::milliseconds timeout);

  // Constant after construction.
  const bool blocks_host_;
  const std::vector<at::Tensor> results_;
  const std::shared_ptr<Operation> operation_;

  std::mutex mu_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // guarded by mu_
  std::shared_ptr<Bell> bell_;                      // guarded by mu_
};

}  // namespace weightsync
