#include "nccl/communicator.h"

#include <cstddef>

#include "cuda/runtime.h"
#include "nccl/aside.h"

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
  made.collnetEnable = kNcclUndefInt;
  made.CTAPolicy = or_undefined(config.cta_policy);
  made.shrinkShare = or_undefined(config.shrink_share);
  made.nvlsCTAs = kNcclUndefInt;
  made.nChannelsPerNetPeer = kNcclUndefInt;
  made.nvlinkCentricSched = kNcclUndefInt;
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
    Deadline deadline, Fill fill) {
  const auto made = std::make_shared<Pointer>();
  Status status = run_aside(
      call, deadline, [library, call, place, made, fill = std::move(fill)]() -> Status {
        Status bound = cuda::bind_device(place.device);
        if (!bound.ok()) return bound;
        ncclComm_t handle = nullptr;
        Status filled = library->check(fill(&handle), call);
        if (filled.ok() && handle != nullptr) {
          made->reset(new Communicator(library, handle, place));
        }
        return filled;
      });
  if (!status.ok()) return status;
  return std::move(*made);
}

Result<Communicator::Pointer> Communicator::create(
    const std::shared_ptr<const Library>& library, const ncclUniqueId& id,
    const Place& place, const Config& config, Deadline deadline) {
  return make(library, "ncclCommInitRankConfig", place, deadline,
              [library, id, place, config](ncclComm_t* made) {
                ncclConfig_t with = as_nccl(config);
                return library->ncclCommInitRankConfig(made, place.size, id, place.rank,
                                                       &with);
              });
}

Result<Communicator::Pointer> Communicator::split(int color, int key,
                                                  const Place& place,
                                                  const Config& config,
                                                  Deadline deadline) {
  return make(library_, "ncclCommSplit", place, deadline,
              [self = shared_from_this(), color, key, config](ncclComm_t* made) {
                ncclConfig_t with = as_nccl(config);
                const std::lock_guard<std::timed_mutex> lock(self->issuing_);
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
  if (ended_.exchange(true)) return {};
  Status status = run_aside(
      call, deadline, [self = shared_from_this(), call, function]() -> Status {
        Status bound = cuda::bind_device(self->device());
        if (!bound.ok()) return bound;
        const std::unique_lock<std::timed_mutex> lock(self->issuing_, kIssuer);
        return self->library_->check((self->library().*function)(self->handle_), call);
      });
  if (status.code() == Code::kTimedOut) quarantined_ = true;
  return status;
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
