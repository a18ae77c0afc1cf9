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

#include <torch/version.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "backend/nccl/dtypes.h"
#include "backend/nccl/handle.h"
#include "backend/nccl/options.h"
#include "backend/nccl/recording.h"
#include "backend/nccl/session.h"
#include "backend/nccl/timeouts.h"
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
  void setGroupUid(const std::string& uid) override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) override;
  void setSequenceNumberForGroup() override {}  // It is 0 on every rank.
  std::uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void enableCollectivesTiming() override { timing_ = true; }
  c10d::ErrorType getError() override;

  void eagerConnectSingleDevice(at::Device device) override;

  bool supportsWindow() const override { return true; }
  c10::intrusive_ptr<c10d::Window> new_window(
      const std::optional<at::Tensor>& tensor = std::nullopt) override;
  // Memory for windows, each in an allocation of its own.
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options = {}) override;

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPointer endCoalescing() override;

  void registerAbortHook(std::int64_t id, c10d::AbortHook hook) override;
  void unregisterAbortHook(std::int64_t id) override;
#if TORCH_VERSION_MINOR >= 15
  bool isInitialized() override;
  bool supportsAbortHooks() const override { return true; }
  bool supportsCompletionHooks() const override { return true; }
  void registerCompletionHook(std::int64_t id, c10d::CompletionHook hook) override;
  void unregisterCompletionHook(std::int64_t id) override;
#endif
  // What is pending fails, hooks run, and the communicator is gone a few seconds later,
  // whatever its state. Idempotent.
  void abort() override;
  // Finishes what is pending, which takes as long as the operations may; then as abort,
  // without hooks. Idempotent.
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

  // --- split_nccl.cpp ---
  bool supportsSplitting() const override { return true; }
  // Called by all ranks. Null in those that are no members of the part.
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                    const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& opts) override;
  // What ranks do that join no part, while the others split.
  void split_nothing();
  bool supportsShrinking() const override { return true; }
  c10::intrusive_ptr<Backend> shrink(
      const std::vector<std::int64_t>& ranks_to_exclude, int shrink_flags,
      const c10::intrusive_ptr<Options>& opts_override) override;

  // --- reconfigure_nccl.cpp ---
  bool supportsReconfigure() const override { return true; }
  c10d::ReconfigureHandle get_reconfigure_handle() const override;
  c10::intrusive_ptr<c10d::Work> reconfigure(
      const c10d::ReconfigureOptions& opts) override;

  // --- for windows, and for the operations above ---

  // The session on this device, made if there is none. Raises if the group ended.
  std::shared_ptr<Session> session(c10::Device device);
  // Of operations that are given none.
  std::chrono::milliseconds timeout_or_default(std::chrono::milliseconds timeout) const;
  const std::shared_ptr<Watchdog>& watchdog() const { return watchdog_; }
  // Which NCCL it uses.
  std::shared_ptr<const nccl::Library> library() const;
  // After abort() or shutdown(): NCCL did not come to its end. Its communicator, the
  // stream and the memory that it uses are left to themselves.
  bool quarantined() const;
  Recording& recording() { return recording_; }

 private:
  friend class WindowNccl;

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
    int peer = -1;        // of a send or a receive
    std::vector<Recording::OneSided> one_sided = {};  // of a call of a window
  };
  // Calls NCCL, inside a group, on this stream.
  using Launch = std::function<void(nccl::Communicator&, cudaStream_t)>;
  struct Batch {
    Call call;
    std::vector<Launch> launches;
    std::vector<Call> calls;
    std::exception_ptr refused;
  };
  // For every operation, in the handler of its exceptions: throws again, but not while
  // a batch is open. That fails at its end then, where torch expects it to: a batch
  // that is left earlier stays open in torch.distributed.
  WorkPointer refused();

  // Issues the call, or adds it to the batch that is open.
  WorkPointer issue(Call call, Launch launch);
  // `calls` are those of a batch.
  WorkPointer issue_now(Call call, const Launch* launches, std::size_t count,
                        const std::vector<Call>& calls = {});
  WorkPointer issue_on(const std::shared_ptr<Session>& session, Call call,
                       const Launch* launches, std::size_t count,
                       Recording::Open& recorded);
  // Keeps the tensors of a call that failed for what it has issued before it did.
  void leave(const std::shared_ptr<Session>& session, Call call,
             const c10::Stream& stream, std::chrono::milliseconds timeout);
  std::vector<recorder::Ticket> record(const Call& call,
                                       const std::vector<Call>& calls);
  c10::Device device_of(const Call& call) const;
  // Alone, a message to oneself never ends.
  void check_not_alone(int peer, const char* call) const;
  // Where a barrier runs that is told nothing.
  c10::Device barrier_device(const c10d::BarrierOptions& opts) const;
  std::shared_ptr<Session> connect(c10::Device device);
  // The group takes nothing more; what it had.
  std::shared_ptr<Session> end(const char* why);

  // The session, null if there is none yet. Raises if the group ended or is not formed.
  std::shared_ptr<Session> session_if_any() const;
  // Ranks of the default group, of those of this one.
  std::vector<std::uint64_t> global_ranks(const std::vector<int>& ranks) const;
  // The group of these ranks, this process being one of them.
  c10::intrusive_ptr<ProcessGroupNccl> part(
      const c10::intrusive_ptr<c10d::Store>& store, int rank,
      const std::vector<int>& ranks, const c10::intrusive_ptr<OptionsNccl>& options,
      nccl::Communicator::Pointer communicator) const;
  // What was made from the communicator of a session. Raises what went wrong.
  nccl::Communicator::Pointer made_from(const std::shared_ptr<Session>& session,
                                        nccl::Result<nccl::Communicator::Pointer> made);

  static shm::Status not_formed();
  c10::Device device_to_form_on() const;
  // Gives up what is pending, and leaves the group unformed.
  void end_session();
  void adopt(nccl::Communicator::Pointer communicator, c10::Device device,
             std::int64_t uuid);

  // Constant after construction.
  const c10::intrusive_ptr<c10d::Store> store_;
  const c10::intrusive_ptr<OptionsNccl> options_;
  const std::shared_ptr<Watchdog> watchdog_;
  const std::shared_ptr<Timeouts> timeouts_;
  const std::string instance_ = new_instance();

  std::atomic<std::uint64_t> sequence_{0};
  std::atomic<bool> timing_{false};
  // It is formed by reconfigure(), and by nothing else.
  std::atomic<bool> elastic_;
  std::atomic<bool> shrunk_{false};
  Recording recording_;

  // By the thread that issues.
  std::optional<Batch> batch_;

  std::mutex connecting_;  // one at a time
  // Guarded by connecting_. The uuids of reconfigure() so far, and the stream that the
  // last generation leaves to the next one: there are not many.
  std::set<std::int64_t> used_;
  std::shared_ptr<OwnStream> stream_;

  mutable std::mutex mu_;
  std::shared_ptr<Session> session_;  // guarded by mu_
  nccl::Communicator::Pointer last_;  // guarded by mu_; of the session that has ended
  shm::Status ended_;                 // guarded by mu_; why, once ended
  std::int64_t uuid_ = 0;             // guarded by mu_; of the last reconfigure()
  // Guarded by mu_; where others meet with this process if the store has no address.
  mutable c10::intrusive_ptr<c10d::Store> server_;
};

}  // namespace weightsync
