// WorkShm: a c10d Work over a shm::Wait.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <mutex>
#include <vector>

#include "../shm/executor.h"
#include "../shm/group.h"

namespace weightsync {

// A file descriptor that becomes readable when something is finished.
class EventFd {
 public:
  EventFd();
  ~EventFd();
  EventFd(const EventFd&) = delete;
  EventFd& operator=(const EventFd&) = delete;
  void notify() const;
  int fd() const { return fd_; }

 private:
  const int fd_;
};

// Finishes by itself once somebody asks for its future or its descriptor; until then a
// blocking wait() runs on the caller's own thread, which is twice as fast.
class WorkShm : public c10d::Work {
 public:
  WorkShm(int rank, c10d::OpType type, std::shared_ptr<shm::Group> group,
          std::shared_ptr<shm::Wait> wait, std::shared_ptr<shm::Job> job = nullptr);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  void blockCurrentStream() override { wait(); }
  std::vector<at::Tensor> result() override { return {}; }

  // Gives the operation up. What a wait has not consumed stays; a put stops soon and
  // does not signal. Finished work is not affected.
  void abort() override;

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;

  // A descriptor that is readable from the moment this work is finished; owned by it.
  int fileno();

 private:
  const std::shared_ptr<shm::Group> group_;
  const std::shared_ptr<shm::Wait> wait_;
  const std::shared_ptr<shm::Job> job_;

  std::mutex mu_;
  std::shared_ptr<EventFd> event_;                  // guarded by mu_
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // guarded by mu_
};

}  // namespace weightsync
