// Session: one communicator of a process group, and what its operations share.
//
// A reconfigure ends one session and begins another. Work and windows keep the session
// that they were made in, so they outlive the group, and know that it ended. Any thread
// may call anything.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backend/nccl/own_stream.h"
#include "cuda/abi.h"
#include "nccl/communicator.h"
#include "nccl/windows.h"
#include "shm/futex.h"

namespace weightsync {

// The CUDA device of the calling thread.
c10::Device current_device();
// The stream that the calling thread uses on a device, and its handle.
c10::Stream current_stream(c10::Device device);
cudaStream_t handle_of(const c10::Stream& stream);
// Whether what is issued on it becomes a part of a CUDA graph, and does not run now.
bool is_captured(const c10::Stream& stream);

class Session : public std::enable_shared_from_this<Session> {
 public:
  // On this stream, or else on a new one.
  Session(nccl::Communicator::Pointer communicator, c10::Device device,
          bool high_priority, std::shared_ptr<OwnStream> stream = nullptr);
  // Leaves its streams to themselves where NCCL could not be brought to an end.
  ~Session();

  nccl::Communicator& communicator() { return *communicator_; }
  const nccl::Communicator::Pointer& share_communicator() const {
    return communicator_;
  }
  // What is registered for windows.
  const std::shared_ptr<nccl::Windows>& windows() const { return windows_; }
  c10::Device device() const { return device_; }
  int rank() const { return communicator_->rank(); }
  int size() const { return communicator_->size(); }
  // Where asynchronous operations run.
  const c10::Stream& stream() const { return stream_->stream(); }
  const std::shared_ptr<OwnStream>& share_stream() const { return stream_; }
  // Where host functions wait for their ends.
  const c10::Stream& listener() const { return listener_->stream(); }

  // Raises if the session failed or ended.
  void check() const;
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  // Why nothing works any more; ok while it does.
  shm::Status failure() const;
  // The first failure stays. True if this is it.
  bool fail(shm::Status why);

  // A call of NCCL, by the thread that holds the communicator's issuing(). NCCL may
  // block in it when a peer is dead; the watchdog sees that by this.
  class Calling {
   public:
    Calling(Session& session, const char* name, shm::Deadline deadline)
        : session_(session) {
      session.call_.store(name, std::memory_order_relaxed);
      session.call_deadline_.store(deadline, std::memory_order_release);
    }
    ~Calling() {
      session_.call_deadline_.store(shm::Deadline::max(), std::memory_order_release);
    }
    Calling(const Calling&) = delete;
    Calling& operator=(const Calling&) = delete;

   private:
    Session& session_;
  };
  // The name of the call that takes too long, or null.
  const char* overdue() const {
    const bool is = call_deadline_.load(std::memory_order_acquire) <= shm::Clock::now();
    return is ? call_.load(std::memory_order_relaxed) : nullptr;
  }

  // Events without timing, used again and again: making one costs more than recording.
  c10::Event take_event();
  void give_back(c10::Event event);

 private:
  // Constant after construction.
  const nccl::Communicator::Pointer communicator_;
  const std::shared_ptr<nccl::Windows> windows_;
  const c10::Device device_;
  const std::shared_ptr<OwnStream> stream_;
  const std::shared_ptr<OwnStream> listener_;

  std::atomic<bool> failed_{false};
  std::atomic<const char*> call_{nullptr};
  std::atomic<shm::Deadline> call_deadline_{shm::Deadline::max()};

  mutable std::mutex mu_;
  shm::Status failure_;             // guarded by mu_
  std::vector<c10::Event> events_;  // guarded by mu_
};

}  // namespace weightsync
