// Communicator: one rank of a communicator, and what it offers to operations.
//
// An ncclComm_t stands for a Communicator; find() tells live handles from anything
// else. It is held by a registry of the process until ncclCommDestroy or ncclCommAbort,
// by the group jobs and by the operations that still run. Any thread may call anything,
// unless it says otherwise.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <typeindex>
#include <vector>

#include "emulator/core.h"
#include "emulator/nccl/background.h"
#include "emulator/nccl/config.h"
#include "emulator/nccl/control.h"
#include "emulator/nccl/operation.h"
#include "emulator/nccl/outcome.h"
#include "emulator/nccl/peer_memory.h"
#include "emulator/nccl/serial.h"
#include "nccl/abi.h"
#include "shm/annotations.h"

namespace weightsync::emulator::nccl {

using Bytes = std::vector<std::byte>;

// Who the ranks are; constant once the communicator is connected.
struct Membership {
  std::uint64_t identity = 0;  // the same on all ranks, unlike any other communicator's
  std::vector<int> devices;    // by rank: the number on the machine (physical_device)
  std::vector<std::int64_t> processes;  // by rank
};

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  // The live communicator behind a handle; null for NULL, dead and foreign handles
  // (the call returns 4 then).
  static std::shared_ptr<Communicator> find(ncclComm_t handle);
  // All that live in this process, for diagnosis.
  static std::vector<std::shared_ptr<Communicator>> all();

  ncclComm_t handle() const { return handle_; }

  // What getters and operations check first: 4 while a nonblocking call is in progress,
  // the async error if there is one, else ok.
  Outcome ready() const;
  // What operations check before ready(): 5 after a revoke. Both in NCCL's order:
  Outcome usable() const;

  int rank() const { return rank_; }
  int size() const { return size_; }
  int device() const { return device_; }
  std::vector<int> all_ranks() const;
  const Membership& members() const { return members_; }
  const Config& config() const { return config_; }
  // "rank 2 of 4 (communicator 1f3a, device 2)": for messages.
  std::string describe() const;

  // State that a family of operations keeps in a communicator (windows, reduction
  // operators); made at the first call, destroyed with the communicator. T needs a
  // default constructor and its own lock.
  template <class T>
  T& part() {
    const shm::MutexLock lock(mu_);
    std::shared_ptr<void>& slot = parts_[std::type_index(typeid(T))];
    if (!slot) slot = std::make_shared<T>();
    return *static_cast<T*>(slot.get());
  }

  // Control segments: this rank's, and a peer's (rank may be one's own).
  Control& control() { return *controls_[static_cast<std::size_t>(rank())]; }
  Control& control(int rank) { return *controls_[static_cast<std::size_t>(rank)]; }
  void ring(int rank) { control(rank).doorbell.ring(); }

  // Host-blocking all-gather of up to kExchangeBytes from every rank, `out` by rank.
  // For bootstrap steps: window registration, the rendezvous of the first one-sided
  // call. All ranks must make their exchanges in the same order. `what` names it in
  // messages. Ends with 6 if a peer died or left, and with 3 if aborted meanwhile.
  Outcome exchange(const std::string& what, const Bytes& in, std::vector<Bytes>& out);

  // Abort and revoke raise it; revoke lowers it when quiescent.
  bool aborted() const { return abort_flag_.load(std::memory_order_acquire); }
  bool revoked() const { return revoked_.load(std::memory_order_acquire); }

  // The single order of this communicator and of those it shares resources with.
  Serial& serial() { return *serial_; }
  PeerMemory& peer_memory() { return peer_memory_; }

  // The async error that ncclCommGetAsyncError reports; the first one stays.
  void fail(const Outcome& outcome);
  ncclResult_t async_result() const { return async_result_.load(); }

  // Sends the operations to the stream, next in serial order; `joined` are further
  // streams of the same group, which wait for them as they wait for those. The group
  // does it; an operation that NCCL executes at the call may do it itself.
  void enqueue(const std::vector<std::shared_ptr<Operation>>& operations,
               const std::shared_ptr<Stream>& stream,
               const std::vector<std::shared_ptr<Stream>>& joined);

  // --- for lifecycle.cpp, family.cpp and group.cpp; operations have no use for it ---

  // A handle for a rank-to-be, in the registry; connect() or retire() follows.
  static std::shared_ptr<Communicator> create(int rank, int size, int device,
                                              Config config);
  // Takes the control segments of all ranks, by rank. Once, before any operation.
  void connect(Membership members, std::vector<std::shared_ptr<shm::Segment>> controls,
               std::shared_ptr<Serial> serial);
  bool connected() const { return connected_.load(std::memory_order_acquire); }

  // Hosts of `ranks` (this one among them, ascending) meet under a key that only they
  // use: all-gather of `in`, and nobody returns before all have everything.
  Outcome meet(std::uint64_t key, const std::vector<int>& ranks,
               const std::string& what, const Bytes& in, std::vector<Bytes>& out);

  // A nonblocking call: the state becomes ncclInProgress, later the outcome. `job` ends
  // when everything is done; whoever needs that waits for it.
  void begin_work(std::shared_ptr<Background> job);
  void end_work(const Outcome& outcome);
  // Whether a background job has begun, ended or not.
  bool has_job() const;
  // Waits for what begin_work announced, if anything; not from its thread.
  void join_work();
  // The same, but only if it is about to end anyway.
  void join_finished_work();

  void raise_abort();
  void lower_abort() { abort_flag_.store(false, std::memory_order_release); }
  void mark_revoked() { revoked_.store(true); }
  // Its user has called for its end, and counts on it no more.
  void mark_leaving() { leaving_.store(true); }
  bool leaving() const { return leaving_.load(); }
  void mark_finalized() { finalized_.store(true); }
  void mark_destroyed() { destroyed_.store(true); }
  bool finalized() const { return finalized_.load(); }
  bool destroyed() const { return destroyed_.load(); }
  bool suspended() const { return suspended_.load(); }
  // False if it was so already.
  bool set_suspended(bool suspended) {
    return suspended_.exchange(suspended) != suspended;
  }

  // Blocks until every operation enqueued so far has ended.
  void synchronize();
  // Leaves: the handle is dead, peers see `gone`, parts are destroyed. Idempotent.
  void retire();
  // Blocks until the ranks of other processes have left too, or died.
  void await_departures();

  std::shared_ptr<Serial> share_serial() const { return serial_; }
  // Children made by calls of all ranks (split, grow) so far.
  std::uint64_t children() const { return children_.load(); }
  std::uint64_t next_child() { return children_.fetch_add(1); }

  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

 private:
  Communicator(int rank, int size, int device, Config config);

  Outcome await_rank(int rank, const std::string& what,
                     const std::function<bool()>& condition);
  bool has_left(int rank);

  // Constant after construction.
  const ncclComm_t handle_;
  const int rank_;
  const int size_;
  const int device_;
  const Config config_;

  // Constant after connect(), which happens before connected_ says so.
  Membership members_;
  std::vector<std::shared_ptr<shm::Segment>> segments_;  // by rank
  std::vector<Control*> controls_;                       // by rank
  std::shared_ptr<Serial> serial_;

  // Own synchronisation.
  PeerMemory peer_memory_;
  std::atomic<bool> connected_{false};
  std::atomic<ncclResult_t> async_result_{ncclSuccess};
  std::atomic<bool> abort_flag_{false};
  std::atomic<bool> revoked_{false};
  std::atomic<bool> leaving_{false};
  std::atomic<bool> finalized_{false};
  std::atomic<bool> destroyed_{false};
  std::atomic<bool> suspended_{false};
  std::atomic<std::uint64_t> children_{0};
  std::mutex meeting_mutex_;  // one meeting at a time

  mutable shm::Mutex mu_;
  std::map<std::type_index, std::shared_ptr<void>> parts_ WEIGHTSYNC_GUARDED_BY(mu_);
  Outcome failure_ WEIGHTSYNC_GUARDED_BY(mu_);  // the async error
  std::shared_ptr<Background> job_ WEIGHTSYNC_GUARDED_BY(mu_);
  std::uint64_t meetings_ WEIGHTSYNC_GUARDED_BY(mu_) = 0;  // attended, for the ring
  std::uint64_t exchanges_ WEIGHTSYNC_GUARDED_BY(mu_) = 0;
  std::uint64_t collectives_ WEIGHTSYNC_GUARDED_BY(mu_) = 0;  // enqueued so far
};

}  // namespace weightsync::emulator::nccl
