// WindowNccl: a c10d window in the memory of GPUs. A put is one of NCCL, and signals.
//
// The memory comes from mem_allocator of the process group. Its whole allocation is
// registered with NCCL, once for each communicator; where the tensors of the other
// ranks lie, and how large they are, is exchanged when a tensor is registered. So puts
// and waits are one-sided from the first one on: they ask nobody anything.
//
// NCCL compares the place where a put begins with what the calling rank itself has
// registered in that round, and refuses what lies beyond that; the size of the other
// rank's memory does not matter to it. So a rank that puts has to register as much as
// those that it puts to, up to where the last put (or its last GiB) begins.
//
// All windows of a process group count signals together, by the rank that sends them.
// A window belongs to the communicator it was made with; when that has ended,
// everything here raises kClosed. Holds the group weakly, for it may be dropped with
// the GIL held. Any thread may call anything, without the GIL.
#pragma once

#include <torch/csrc/distributed/c10d/Window.hpp>

#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

#include "backend/nccl/process_group_nccl.h"
#include "backend/nccl/registration_nccl.h"

namespace weightsync {

class WindowNccl : public c10d::Window {
 public:
  using WorkPointer = ProcessGroupNccl::WorkPointer;

  WindowNccl(c10::weak_intrusive_ptr<ProcessGroupNccl> group,
             std::shared_ptr<Session> session);

  // Collective. An empty tensor exposes nothing.
  void tensor_register(const at::Tensor& tensor, bool owning = true) override;
  // Collective. What was put before is there when it returns.
  void tensor_deregister() override;

  WorkPointer put(const at::Tensor& tensor, int64_t dst, int64_t offset, bool async_op,
                  const c10d::PutOptions& opts = c10d::PutOptions()) override;
  WorkPointer signal(int64_t peer, bool async_op,
                     const c10d::SignalOptions& opts = c10d::SignalOptions()) override;
  WorkPointer wait_signal(
      int64_t peer, bool async_op,
      const c10d::WaitSignalOptions& opts = c10d::WaitSignalOptions()) override;
  at::Tensor map_remote_tensor(int64_t rank) override;
  c10d::WindowAttr get_attr(int64_t peer) override;

  // All runs in one group of NCCL: tensors to the window of `dst`, which gets `signals`
  // signals. Each run is one put, or one for each row if its rows have gaps; NCCL
  // signals once for each put, so fewer signals than puts are kInvalid.
  WorkPointer put_many(std::vector<at::Tensor> tensors, const at::Tensor& runs,
                       int64_t dst, int64_t signals, bool async_op);
  // Takes counts[i] signals of peers[i], in one wait of NCCL.
  WorkPointer wait_signals(const std::vector<int64_t>& peers,
                           const std::vector<int64_t>& counts,
                           std::chrono::milliseconds timeout, bool async_op);
  // Copies between this rank's own window and tensors, in the same table of runs. What
  // goes into the window may lie on the host.
  WorkPointer copy_local(std::vector<at::Tensor> tensors, const at::Tensor& runs,
                         bool to_window, bool async_op);
  // Puts need no more than the registration: these only check what is asked.
  void connect(const std::vector<int64_t>& peers);
  void prepare(const at::Tensor& runs, int64_t dst);
  // Bytes of the window of `peer`.
  int64_t peer_nbytes(int64_t peer);

 private:
  // Where a put goes: the window of NCCL, and the byte of it that is the first one.
  struct Target {
    int peer = 0;
    ncclWindow_t handle = nullptr;
    std::size_t start = 0;
    std::size_t local_bytes = 0;  // of this rank's share of that window of NCCL
  };
  using Call = ProcessGroupNccl::Call;
  using Launch = ProcessGroupNccl::Launch;

  // The group, if the window can still be used; raises kClosed if not.
  c10::intrusive_ptr<ProcessGroupNccl> open() const;
  int checked(int64_t peer, const char* call) const;
  Place place_of(int peer) const;
  Target target_of(const Place& place, int peer) const;
  // That NCCL takes a put of these bytes at `offset` of the window.
  void check_target(const Target& target, std::size_t offset, std::size_t nbytes) const;
  // That NCCL takes this memory as the source of a put.
  void check_source(const at::Tensor& tensor, const char* call) const;
  Meeting meeting(const ProcessGroupNccl& group) const;
  WorkPointer issue(Call call, const std::vector<Launch>& launches);

  // Constant after construction.
  const c10::weak_intrusive_ptr<ProcessGroupNccl> group_;
  const std::shared_ptr<Session> session_;

  mutable std::mutex mu_;
  std::vector<Place> places_;    // guarded by mu_; by rank, empty until registered
  at::Tensor tensor_;            // guarded by mu_; if the window owns it
  std::byte* memory_ = nullptr;  // guarded by mu_; this rank's
};

}  // namespace weightsync
