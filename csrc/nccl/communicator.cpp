#include "nccl/communicator.h"

#include <cstddef>

#include "cuda/runtime.h"
#include "nccl/lock_for.h"

namespace weightsync::nccl {
namespace {

// Up to numRmaCtx: the layout of 2.29, the oldest NCCL that we take. Newer ones fill in
// the rest.
constexpr std::size_t kConfigBytes = offsetof(ncclConfig_t, maxP2pPeers);
constexpr unsigned kConfigVersion = 22900;

// How long the end waits for a thread that issues operations.
constexpr std::chrono::seconds kIssuer{1};

int or_undefined(const std::optional<int>& value) {
  return value.value_or(kNcclUndefInt);
}

const char* or_null(const std::string& text) {
  return text.empty() ? nullptr : text.c_str();
}

}  // namespace

ncclConfig_t as_nccl(const Config& config) {
  ncclConfig_t made{};
  made.size = kConfigBytes;
  made.magic = kNcclApiMagic;
  made.version = kConfigVersion;
  made.blocking = 1;
  made.cgaClusterSize = or_undefined(config.cga_cluster_size);
  made.minCTAs = or_undefined(config.min_ctas);
  made.maxCTAs = or_undefined(config.max_ctas);
  made.netName = or_null(config.net_name);
  made.splitShare = or_undefined(config.split_share);
  made.trafficClass = or_undefined(config.traffic_class);
  made.commName = or_null(config.name);
  made.collnetEnable = or_undefined(config.collnet_enable);
  made.CTAPolicy = or_undefined(config.cta_policy);
  made.shrinkShare = or_undefined(config.shrink_share);
  made.nvlsCTAs = or_undefined(config.nvls_ctas);
  made.nChannelsPerNetPeer = or_undefined(config.n_channels_per_net_peer);
  made.nvlinkCentricSched = or_undefined(config.nvlink_centric_sched);
  made.graphUsageMode = kNcclUndefInt;
  made.numRmaCtx = kNcclUndefInt;
  return made;
}

Result<ncclUniqueId> make_unique_id(const Library& library) {
  ncclUniqueId id{};
  Status made = library.check(library.ncclGetUniqueId(&id), "ncclGetUniqueId");
  if (!made.ok()) return made;
  return id;
}

Result<Communicator::Pointer> Communicator::make(
    const std::shared_ptr<const Library>& library, const char* call, const Place& place,
    Deadline deadline, Fill fill, const Interrupted& interrupted) {
  // If it comes when nobody waits for it any more it has to go: the others count on it.
  struct Making {
    std::mutex mutex;
    Pointer made;           // guarded by mutex
    bool given_up = false;  // guarded by mutex
  };
  const auto making = std::make_shared<Making>();
  Status status = run_aside(
      call, deadline,
      [library, call, place, making, fill = std::move(fill)]() -> Status {
        Status bound = cuda::bind_device(place.device);
        if (!bound.ok()) return bound;
        ncclComm_t handle = nullptr;
        Status filled = library->check(fill(&handle), call);
        if (!filled.ok() || handle == nullptr) return filled;
        const std::lock_guard<std::mutex> lock(making->mutex);
        if (making->given_up)
          return library->check(library->ncclCommAbort(handle), call);
        making->made.reset(new Communicator(library, handle, place));
        return filled;
      },
      interrupted);
  const std::lock_guard<std::mutex> lock(making->mutex);
  making->given_up = true;
  // It may have come just now.
  if (!status.ok() && making->made == nullptr) return status;
  return std::move(making->made);
}

Result<Communicator::Pointer> Communicator::create(
    const std::shared_ptr<const Library>& library, const ncclUniqueId& id,
    const Place& place, const Config& config, Deadline deadline,
    const Interrupted& interrupted) {
  return make(
      library, "ncclCommInitRankConfig", place, deadline,
      [library, id, place, config](ncclComm_t* made) {
        ncclConfig_t with = as_nccl(config);
        return library->ncclCommInitRankConfig(made, place.size, id, place.rank, &with);
      },
      interrupted);
}

Result<Communicator::Pointer> Communicator::split(int color, int key,
                                                  const Place& place,
                                                  const Config& config,
                                                  Deadline deadline) {
  return make(library_, "ncclCommSplit", place, deadline,
              [self = shared_from_this(), color, key, config](ncclComm_t* made) {
                ncclConfig_t with = as_nccl(config);
                const std::lock_guard<std::timed_mutex> lock(self->issuing_);
                if (self->ended()) return ncclInvalidUsage;
                return self->library_->ncclCommSplit(self->handle_, color, key, made,
                                                     &with);
              });
}

Result<Communicator::Pointer> Communicator::shrink(std::vector<int> excluded,
                                                   bool abort, const Place& place,
                                                   const Config& config,
                                                   Deadline deadline) {
  const int flags = abort ? kNcclShrinkAbort : kNcclShrinkDefault;
  return make(library_, "ncclCommShrink", place, deadline,
              [self = shared_from_this(), excluded = std::move(excluded), flags,
               config](ncclComm_t* made) mutable {
                ncclConfig_t with = as_nccl(config);
                const std::lock_guard<std::timed_mutex> lock(self->issuing_);
                if (self->ended()) return ncclInvalidUsage;
                // NCCL sorts this list in place: it is ours.
                return self->library_->ncclCommShrink(self->handle_, excluded.data(),
                                                      static_cast<int>(excluded.size()),
                                                      made, &with, flags);
              });
}

Status Communicator::revoke(Deadline deadline) {
  if (ended() || revoked_.exchange(true)) return {};
  Status status = run_aside("ncclCommRevoke", deadline, [self = shared_from_this()] {
    return self->library_->check(
        self->library_->ncclCommRevoke(self->handle_, kNcclRevokeDefault),
        "ncclCommRevoke");
  });
  if (status.code() == Code::kTimedOut) quarantined_ = true;
  return status;
}

Status Communicator::abort(Deadline deadline) {
  return end("ncclCommAbort", &Library::ncclCommAbort, deadline);
}

Status Communicator::destroy(Deadline deadline) {
  return end("ncclCommDestroy", &Library::ncclCommDestroy, deadline);
}

Status Communicator::end(const char* call, End function, Deadline deadline) {
  if (ended_.exchange(true)) {
    await_end(deadline);
    return {};
  }
  // Whoever asks for an error at this moment still has the handle.
  {
    const std::lock_guard<std::mutex> lock(asking_);
  }
  Status status = run_aside(
      call, deadline, [self = shared_from_this(), call, function]() -> Status {
        Status bound = cuda::bind_device(self->device());
        if (!bound.ok()) return bound;
        const auto lock = lock_for(self->issuing_, kIssuer);
        Status ended =
            self->library_->check((self->library().*function)(self->handle_), call);
        if (ended.ok()) self->gone_ = true;
        return ended;
      });
  if (!status.ok()) quarantined_ = true;
  const std::lock_guard<std::mutex> lock(ending_);
  end_is_known_ = true;
  end_known_.notify_all();
  return status;
}

void Communicator::await_end(Deadline deadline) {
  std::unique_lock<std::mutex> lock(ending_);
  end_known_.wait_until(lock, deadline, [this] { return end_is_known_; });
}

Status Communicator::async_error() const {
  const std::lock_guard<std::mutex> lock(asking_);
  if (ended()) return {};
  ncclResult_t found = ncclSuccess;
  Status asked = library_->check(library_->ncclCommGetAsyncError(handle_, &found),
                                 "ncclCommGetAsyncError");
  if (!asked.ok()) return asked;
  return library_->check(found, "an operation of NCCL");
}

}  // namespace weightsync::nccl
