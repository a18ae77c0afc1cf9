// The edge of the library: versions, ids, errors and groups.
#include "emulator/nccl/bootstrap.h"
#include "emulator/nccl/config.h"
#include "emulator/nccl/entry.h"
#include "emulator/nccl/symbols.h"

using namespace weightsync::emulator::nccl;  // NOLINT: this file is the edge

namespace {

const char* error_string(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
      return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument:
      return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage:
      return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    case ncclTimeout:
      return "timeout";
    default:
      return "unknown result code";
  }
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_alone(site, [=]() -> Outcome {
    if (version == nullptr) return invalid_argument("the version pointer is NULL");
    *version = emulated_version();
    return {};
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclGetVersion)

ncclResult_t ncclGetUniqueId(ncclUniqueId* uniqueId) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_alone(site, [=]() -> Outcome {
    if (uniqueId == nullptr) return invalid_argument("the unique id is NULL");
    return make_unique_id(0, *uniqueId);
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclGetUniqueId)

const char* ncclGetErrorString(ncclResult_t result) { return error_string(result); }
WEIGHTSYNC_NCCL_P_NAME(ncclGetErrorString)

const char* ncclGetLastError(ncclComm_t /*comm*/) { return last_error(); }
WEIGHTSYNC_NCCL_P_NAME(ncclGetLastError)

// NCCL_DEBUG is read at each use.
void ncclResetDebugInit() {}
WEIGHTSYNC_NCCL_P_NAME(ncclResetDebugInit)

void ncclResetDebugInitInternal() {}

// Not call(): these open and close the very group that it would.

ncclResult_t ncclGroupStart() {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_bare(site, [=] { return group_start(); });
}
WEIGHTSYNC_NCCL_P_NAME(ncclGroupStart)

ncclResult_t ncclGroupEnd() {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_bare(site, [=] { return group_end(); });
}
WEIGHTSYNC_NCCL_P_NAME(ncclGroupEnd)

ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t* simInfo) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_bare(site, [=] { return group_simulate_end(simInfo); });
}
WEIGHTSYNC_NCCL_P_NAME(ncclGroupSimulateEnd)

}  // extern "C"
