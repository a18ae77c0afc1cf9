// WindowShm: a c10d window in shared memory. A put is a copy, a signal is a counter.
//
// Bounds are checked against the window of the rank that is put into. A put raises the
// counter once, after its bytes; a batch raises it by the number asked for, after all
// its bytes. The window belongs to the configuration it was made in: after a
// reconfigure or abort everything here raises kClosed. Any thread may call anything,
// without the GIL.
#pragma once

#include <torch/csrc/distributed/c10d/Window.hpp>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "process_group_shm.h"
#include "work_shm.h"

namespace weightsync {

class WindowShm : public c10d::Window {
 public:
  WindowShm(c10::intrusive_ptr<ProcessGroupShm> group,
            std::shared_ptr<Configuration> configuration);

  // Collective. The tensor must come from allocateTensor of this backend.
  void tensor_register(const at::Tensor& tensor, bool owning = true) override;
  void tensor_deregister() override;

  c10::intrusive_ptr<c10d::Work> put(
      const at::Tensor& tensor, int64_t dst, int64_t offset, bool async_op,
      const c10d::PutOptions& opts = c10d::PutOptions()) override;
  c10::intrusive_ptr<c10d::Work> signal(
      int64_t peer, bool async_op,
      const c10d::SignalOptions& opts = c10d::SignalOptions()) override;
  c10::intrusive_ptr<c10d::Work> wait_signal(
      int64_t peer, bool async_op,
      const c10d::WaitSignalOptions& opts = c10d::WaitSignalOptions()) override;
  at::Tensor map_remote_tensor(int64_t rank) override;
  c10d::WindowAttr get_attr(int64_t peer) override;

  // All runs in one call: tensors to the window of `dst`, then `signals` signals.
  // Sources are kept alive until the work is finished.
  c10::intrusive_ptr<WorkShm> put_many(std::vector<at::Tensor> tensors,
                                       const at::Tensor& runs, int64_t dst,
                                       int64_t signals, bool async_op);

  // Takes counts[i] signals of peers[i], all together or none.
  c10::intrusive_ptr<WorkShm> wait_signals(const std::vector<int64_t>& peers,
                                           const std::vector<int64_t>& counts,
                                           std::chrono::milliseconds timeout,
                                           bool async_op);

  // Copies between this rank's own window and tensors, in the same table of runs.
  c10::intrusive_ptr<WorkShm> copy_local(std::vector<at::Tensor> tensors,
                                         const at::Tensor& runs, bool to_window,
                                         bool async_op);

  // Signals of `peer` that have arrived and were not taken.
  int64_t available_signals(int64_t peer);

  // Maps the windows of these ranks now, so that no put pays for it. Idempotent.
  void connect(const std::vector<int64_t>& peers);
  // Makes the pages present that these runs will be put into; else the first put is
  // slower by a microsecond a page. Only those: a peer's window may be larger than what
  // this rank has memory for.
  void prepare(const at::Tensor& runs, int64_t dst);

  // Bytes of the window of `peer`.
  int64_t peer_nbytes(int64_t peer);

 private:
  struct Peer {
    shm::WindowEntry entry{};
    std::shared_ptr<shm::Segment> segment;  // null until connected
  };

  // A window that is mapped here, for as long as this lives.
  struct Mapped {
    std::byte* base;
    shm::WindowEntry entry;
    std::shared_ptr<shm::Segment> segment;
  };

  shm::Group& group() const { return *configuration_->group; }
  // The window of `peer`, mapped on first use.
  Mapped mapped(int peer);
  const shm::WindowEntry& entry_of(int peer);
  int checked(int64_t peer) const;
  // What the runs touch must be in `kept` or in `segment`.
  c10::intrusive_ptr<WorkShm> submit(std::vector<shm::Run> runs,
                                     std::vector<at::Tensor> kept,
                                     std::shared_ptr<shm::Segment> segment,
                                     std::function<shm::Status()> after, bool async_op);
  c10::intrusive_ptr<WorkShm> finish(c10::intrusive_ptr<WorkShm> work, bool async_op);

  // Constant after construction.
  const c10::intrusive_ptr<ProcessGroupShm> pg_;
  const std::shared_ptr<Configuration> configuration_;

  std::mutex mu_;
  std::vector<Peer> peers_;  // guarded by mu_; empty until registered
  at::Tensor tensor_;        // guarded by mu_
};

}  // namespace weightsync
