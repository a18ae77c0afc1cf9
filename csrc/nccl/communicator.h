// Communicator: one rank of a communicator of NCCL, from its making to its end.
//
// Whatever may block without an end when a peer is dead takes a deadline and runs
// aside. A call that misses its deadline goes on, and the communicator is quarantined:
// what it holds stays, and nobody waits for it any more.
//
// Any thread may call anything. NCCL wants the operations of a communicator issued one
// at a time: whoever issues them holds issuing(), and looks at ended() then. The end
// waits for that lock, but not for long: an issuer may be stuck in NCCL, which the end
// releases.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "nccl/aside.h"
#include "nccl/library.h"
#include "shm/futex.h"

namespace weightsync::nccl {

using shm::Deadline;

// What a communicator is made with. A field that is not set is left to NCCL; see
// ncclConfig_t in its documentation.
struct Config {
  std::optional<int> cga_cluster_size;
  std::optional<int> min_ctas;
  std::optional<int> max_ctas;
  std::optional<int> cta_policy;
  std::optional<int> split_share;
  std::optional<int> shrink_share;
  std::optional<int> traffic_class;
  std::optional<int> collnet_enable;
  std::optional<int> nvls_ctas;
  std::optional<int> n_channels_per_net_peer;
  std::optional<int> nvlink_centric_sched;
  std::string net_name;
  std::string name;  // in NCCL's own messages
};

// As NCCL takes it: valid as long as `config` is.
ncclConfig_t as_nccl(const Config& config);

// An id for one communicator, made by one of its ranks.
Result<ncclUniqueId> make_unique_id(const Library& library);

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  using Pointer = std::shared_ptr<Communicator>;

  struct Place {
    int rank = 0;
    int size = 1;
    int device = 0;
  };

  // Blocks until all ranks have come, or it is interrupted.
  static Result<Pointer> create(const std::shared_ptr<const Library>& library,
                                const ncclUniqueId& id, const Place& place,
                                const Config& config, Deadline deadline,
                                const Interrupted& interrupted = nullptr);

  // Called by all ranks of this one; `place` is that in the child. A null pointer where
  // the color is kNcclSplitNoColor.
  Result<Pointer> split(int color, int key, const Place& place, const Config& config,
                        Deadline deadline);
  // Called by the ranks that stay. With `abort` what is pending ends first.
  Result<Pointer> shrink(std::vector<int> excluded, bool abort, const Place& place,
                         const Config& config, Deadline deadline);

  // What is pending ends, and later operations fail. Idempotent.
  Status revoke(Deadline deadline);
  // Ends it now, whatever its state. Idempotent: a later call waits for the first.
  Status abort(Deadline deadline);
  // Ends it when what is pending has ended. Idempotent.
  Status destroy(Deadline deadline);

  bool ended() const { return ended_.load(); }
  bool quarantined() const { return quarantined_.load(); }
  // NCCL has given it up: it touches no memory and no stream any more.
  bool gone() const { return gone_.load(); }
  // What went wrong behind the calls, if anything. Never blocks.
  Status async_error() const;

  ncclComm_t handle() const { return handle_; }
  const Library& library() const { return *library_; }
  const std::shared_ptr<const Library>& share_library() const { return library_; }
  int rank() const { return place_.rank; }
  int size() const { return place_.size; }
  int device() const { return place_.device; }
  std::timed_mutex& issuing() { return issuing_; }

  // Does not end it, for that may block: abort() or destroy() do.
  ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

 private:
  using Fill = std::function<ncclResult_t(ncclComm_t*)>;
  using End = Function<decltype(ncclCommAbort)> Library::*;

  Communicator(std::shared_ptr<const Library> library, ncclComm_t handle, Place place)
      : library_(std::move(library)), place_(place), handle_(handle) {}

  static Result<Pointer> make(const std::shared_ptr<const Library>& library,
                              const char* call, const Place& place, Deadline deadline,
                              Fill fill, const Interrupted& interrupted = nullptr);
  Status end(const char* call, End function, Deadline deadline);
  void await_end(Deadline deadline);

  // Constant after construction.
  const std::shared_ptr<const Library> library_;
  const Place place_;
  const ncclComm_t handle_;

  // Own synchronisation.
  std::timed_mutex issuing_;
  mutable std::mutex asking_;  // async_error() against the end
  std::atomic<bool> ended_{false};
  std::atomic<bool> revoked_{false};
  std::atomic<bool> quarantined_{false};
  std::atomic<bool> gone_{false};
  std::mutex ending_;
  std::condition_variable end_known_;
  bool end_is_known_ = false;  // guarded by ending_; what became of it
};

}  // namespace weightsync::nccl
