// ProcessGroupNccl: the c10d backend "weightsync-nccl2", on one communicator of NCCL.
//
// The communicator is made when a device is bound, else by the first operation, on the
// device of its tensors. Asynchronous operations run on one internal stream, others on
// the current one. The group never ends the process.
//
// Owns the session and the watchdog. A destructor is not a teardown: shutdown() and
// abort() are, idempotently. Any thread may call anything, without the GIL; operations
// of one group are issued by one thread at a time.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backend/nccl/dtypes.h"
#include "backend/nccl/options.h"
#include "backend/nccl/session.h"
#include "backend/nccl/watchdog.h"
#include "backend/nccl/work_nccl.h"

namespace weightsync {

class ProcessGroupNccl : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPointer = c10::intrusive_ptr<c10d::Work>;

  ProcessGroupNccl(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                   c10::intrusive_ptr<OptionsNccl> options);
  ~ProcessGroupNccl() override;

  const std::string getBackendName() const override { return kNcclBackend; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  std::uint64_t getSequenceNumberForGroup() override { return sequence_; }
  c10d::ErrorType getError() override;

  bool supportsSplitting() const override { return true; }
  void eagerConnectSingleDevice(at::Device device) override;

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPointer endCoalescing() override;

  void registerAbortHook(std::int64_t id, c10d::AbortHook hook) override;
  void unregisterAbortHook(std::int64_t id) override;
  void abort() override;
  void shutdown() override;

  // --- collectives.cpp ---
  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPointer allreduce_coalesced(Tensors& tensors,
                                  const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPointer all_gather_single(at::Tensor& output, at::Tensor& input,
                                const c10d::AllgatherOptions& opts) override;
  WorkPointer all_gather_single_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPointer reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                                    const c10d::ReduceScatterOptions& opts) override;
  WorkPointer reduce_scatter_single_coalesced(
      Tensors& outputs, Tensors& inputs,
      const c10d::ReduceScatterOptions& opts) override;
  WorkPointer barrier(const c10d::BarrierOptions& opts) override;

  // --- lists.cpp ---
  WorkPointer allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                        const c10d::AllgatherOptions& opts) override;
  WorkPointer allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                  const c10d::AllgatherOptions& opts) override;
  WorkPointer reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                             const c10d::ReduceScatterOptions& opts) override;
  WorkPointer all_to_all_single(at::Tensor& output, at::Tensor& input,
                                std::vector<std::int64_t>& output_splits,
                                std::vector<std::int64_t>& input_splits,
                                const c10d::AllToAllOptions& opts) override;
  WorkPointer alltoall(Tensors& outputs, Tensors& inputs,
                       const c10d::AllToAllOptions& opts) override;
  WorkPointer gather(std::vector<Tensors>& outputs, Tensors& inputs,
                     const c10d::GatherOptions& opts) override;
  WorkPointer gather_single(at::Tensor& output, at::Tensor& input,
                            const c10d::GatherOptions& opts) override;
  WorkPointer scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                      const c10d::ScatterOptions& opts) override;

  // --- point_to_point.cpp ---
  WorkPointer send(Tensors& tensors, int destination, int tag) override;
  WorkPointer recv(Tensors& tensors, int source, int tag) override;
  WorkPointer recvAnysource(Tensors& tensors, int tag) override;

  // --- for windows, and for the operations above ---

  // The session on this device, made if there is none. Raises if the group ended.
  std::shared_ptr<Session> session(c10::Device device);
  // Of operations that are given none.
  std::chrono::milliseconds timeout_or_default(std::chrono::milliseconds timeout) const;
  const std::shared_ptr<Watchdog>& watchdog() const { return watchdog_; }

 private:
  // What an operation is, before it is issued.
  struct Call {
    c10d::OpType type = c10d::OpType::UNKNOWN;
    const char* name = "";
    Tensors inputs;
    Tensors outputs;
    bool async = true;
    std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
    bool blocks_host = false;
    bool counts = true;   // as a collective, in the sequence of the group
    bool grouped = true;  // makes more than one call of NCCL
  };
  // Calls NCCL, inside a group, on this stream.
  using Launch = std::function<void(nccl::Communicator&, cudaStream_t)>;
  struct Batch {
    Call call;
    std::vector<Launch> launches;
    std::exception_ptr refused;
  };
  // For every operation, in the handler of its exceptions: throws again, but not while
  // a batch is open. That fails at its end then, where torch expects it to: a batch
  // that is left earlier stays open in torch.distributed.
  WorkPointer refused();

  // Issues the call, or adds it to the batch that is open.
  WorkPointer issue(Call call, Launch launch);
  WorkPointer issue_now(Call call, const Launch* launches, std::size_t count);
  c10::Device device_of(const Call& call) const;
  // Alone, a message to oneself never ends.
  void check_not_alone(int peer, const char* call) const;
  // Where a barrier runs that is told nothing.
  c10::Device barrier_device(const c10d::BarrierOptions& opts) const;
  std::shared_ptr<Session> connect(c10::Device device);
  // The group takes nothing more; what it had.
  std::shared_ptr<Session> end(const char* why);

  // Constant after construction.
  const c10::intrusive_ptr<c10d::Store> store_;
  const c10::intrusive_ptr<OptionsNccl> options_;
  const std::shared_ptr<Watchdog> watchdog_;

  std::atomic<std::uint64_t> sequence_{0};

  // By the thread that issues.
  std::optional<Batch> batch_;

  std::mutex connecting_;  // one at a time

  mutable std::mutex mu_;
  std::chrono::milliseconds timeout_;  // guarded by mu_
  std::shared_ptr<Session> session_;   // guarded by mu_
  shm::Status ended_;                  // guarded by mu_; why, once ended
};

}  // namespace weightsync
