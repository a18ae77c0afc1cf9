// The edge of the library: the life of communicators.
#include <string>

#include "emulator/nccl/entry.h"
#include "emulator/nccl/lifecycle.h"
#include "emulator/nccl/symbols.h"

using namespace weightsync::emulator::nccl;  // NOLINT: this file is the edge

namespace {

// What a creating function returns: nonblocking, always that it goes on, though it may
// be through by now.
ncclResult_t created(ncclResult_t result, const ncclComm_t* newcomm) {
  if (result != ncclSuccess || newcomm == nullptr) return result;
  const CommunicatorPtr made = Communicator::find(*newcomm);
  return made && !made->config().blocking ? ncclInProgress : result;
}

ncclResult_t init(const CallSite& site, ncclComm_t* newcomm, int nranks, int rank,
                  int id_count, const ncclUniqueId* ids, const ncclConfig_t* config) {
  const auto body = [=] {
    return init_rank(newcomm, nranks, rank, id_count, ids, config);
  };
  return created(call(site, body, Progress::kSuccess), newcomm);
}

// What a getter gives; `get` is asked once the communicator is ready.
ncclResult_t getter(const CallSite& site, ncclComm_t comm, int* value,
                    int (*get)(const Communicator&)) {
  return call_alone_on(site, comm, [=](const CommunicatorPtr& communicator) -> Outcome {
    if (value == nullptr) return invalid_argument("the result pointer is NULL");
    if (Outcome ready = communicator->ready(); !ready.ok()) return ready;
    *value = get(*communicator);
    return {};
  });
}

}  // namespace

extern "C" {

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId commId,
                              int rank) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return init(site, comm, nranks, rank, 1, &commId, nullptr);
}
WEIGHTSYNC_NCCL_P_NAME(ncclCommInitRank)

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId commId,
                                    int rank, ncclConfig_t* config) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return init(site, comm, nranks, rank, 1, &commId, config);
}
WEIGHTSYNC_NCCL_P_NAME(ncclCommInitRankConfig)

ncclResult_t ncclCommInitRankScalable(ncclComm_t* newcomm, int nranks, int myrank,
                                      int nId, ncclUniqueId* commIds,
                                      ncclConfig_t* config) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return init(site, newcomm, nranks, myrank, nId, commIds, config);
}
WEIGHTSYNC_NCCL_P_NAME(ncclCommInitRankScalable)

ncclResult_t ncclCommInitAll(ncclComm_t* comm, int ndev, const int* devlist) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call(site, [=] { return init_all(comm, ndev, devlist); });
}
WEIGHTSYNC_NCCL_P_NAME(ncclCommInitAll)

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_on_any(site, comm, finalize);
}
WEIGHTSYNC_NCCL_P_NAME(ncclCommFinalize)

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_on_any(site, comm, destroy);
}
WEIGHTSYNC_NCCL_P_NAME(ncclCommDestroy)

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_on_any(site, comm, abort_operations);
}
WEIGHTSYNC_NCCL_P_NAME(ncclCommAbort)

ncclResult_t ncclCommRevoke(ncclComm_t comm, int revokeFlags) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_on_any(site, comm, [=](const CommunicatorPtr& communicator) {
    return revoke(communicator, revokeFlags);
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclCommRevoke)

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm,
                           ncclConfig_t* config) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_on(
      site, comm,
      [=](const CommunicatorPtr& communicator) {
        return split(communicator, color, key, newcomm, config);
      },
      Progress::kSuccess);
}
WEIGHTSYNC_NCCL_P_NAME(ncclCommSplit)

ncclResult_t ncclCommShrink(ncclComm_t comm, int* excludeRanksList,
                            int excludeRanksCount, ncclComm_t* newcomm,
                            ncclConfig_t* config, int shrinkFlags) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_on(
      site, comm,
      [=](const CommunicatorPtr& communicator) {
        return shrink(communicator, excludeRanksList, excludeRanksCount, newcomm,
                      config, shrinkFlags);
      },
      Progress::kSuccess);
}
WEIGHTSYNC_NCCL_P_NAME(ncclCommShrink)

ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId* uniqueId) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_alone_on(site, comm, [=](const CommunicatorPtr& communicator) {
    return unique_id_for_growth(communicator, uniqueId);
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclCommGetUniqueId)

ncclResult_t ncclCommGrow(ncclComm_t comm, int nRanks, const ncclUniqueId* uniqueId,
                          int rank, ncclComm_t* newcomm, ncclConfig_t* config) {
  const CallSite site{__func__, __builtin_return_address(0)};
  const auto body = [=]() -> Outcome {
    const CommunicatorPtr parent = Communicator::find(comm);
    if (comm != nullptr && !parent) return dead_handle(comm);
    return grow(parent, nRanks, uniqueId, rank, newcomm, config);
  };
  return created(call(site, body, Progress::kSuccess), newcomm);
}
WEIGHTSYNC_NCCL_P_NAME(ncclCommGrow)

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* asyncError) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_alone_on(site, comm, [=](const CommunicatorPtr& communicator) {
    return async_error(communicator, asyncError);
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclCommGetAsyncError)

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return getter(site, comm, count,
                [](const Communicator& communicator) { return communicator.size(); });
}
WEIGHTSYNC_NCCL_P_NAME(ncclCommCount)

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return getter(site, comm, device,
                [](const Communicator& communicator) { return communicator.device(); });
}
WEIGHTSYNC_NCCL_P_NAME(ncclCommCuDevice)

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return getter(site, comm, rank,
                [](const Communicator& communicator) { return communicator.rank(); });
}
WEIGHTSYNC_NCCL_P_NAME(ncclCommUserRank)

ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buff, std::size_t size,
                              void** handle) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_alone_on(site, comm, [=](const CommunicatorPtr& communicator) {
    return register_buffer(communicator, buff, size, handle);
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclCommRegister)

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_alone_on(site, comm, [=](const CommunicatorPtr& communicator) {
    return deregister_buffer(communicator, handle);
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclCommDeregister)

ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_alone_on(site, comm, [=](const CommunicatorPtr& communicator) {
    return suspend(communicator, flags);
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclCommSuspend)

ncclResult_t ncclCommResume(ncclComm_t comm) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_alone_on(site, comm, [=](const CommunicatorPtr& communicator) {
    return resume(communicator);
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclCommResume)

ncclResult_t ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t stat,
                              std::uint64_t* value) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_alone_on(site, comm, [=](const CommunicatorPtr& communicator) {
    return memory_stat(communicator, stat, value);
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclCommMemStats)

}  // extern "C"
