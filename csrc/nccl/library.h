// Library: the functions of a libnccl that is opened at run time.
//
// Nothing here is linked with NCCL, and no header of NCCL is needed. A function that an
// older NCCL lacks is an error when it is called, and only then. Never closed: NCCL
// keeps threads of its own.
#pragma once

#include <memory>
#include <string>

#include "cuda/function.h"
#include "nccl/abi.h"
#include "nccl/prototypes.h"
#include "shm/status.h"

namespace weightsync::nccl {

using shm::Code;
using shm::Result;
using shm::Status;

// Those that we call.
#define WEIGHTSYNC_NCCL_FUNCTIONS(EACH) \
  EACH(ncclGetVersion)                  \
  EACH(ncclGetUniqueId)                 \
  EACH(ncclCommInitRankConfig)          \
  EACH(ncclCommFinalize)                \
  EACH(ncclCommDestroy)                 \
  EACH(ncclCommAbort)                   \
  EACH(ncclCommRevoke)                  \
  EACH(ncclCommSplit)                   \
  EACH(ncclCommShrink)                  \
  EACH(ncclCommGetAsyncError)           \
  EACH(ncclCommSuspend)                 \
  EACH(ncclCommResume)                  \
  EACH(ncclCommMemStats)                \
  EACH(ncclMemAlloc)                    \
  EACH(ncclMemFree)                     \
  EACH(ncclCommWindowRegister)          \
  EACH(ncclCommWindowDeregister)        \
  EACH(ncclRedOpCreatePreMulSum)        \
  EACH(ncclRedOpDestroy)                \
  EACH(ncclReduce)                      \
  EACH(ncclBroadcast)                   \
  EACH(ncclAllReduce)                   \
  EACH(ncclReduceScatter)               \
  EACH(ncclAllGather)                   \
  EACH(ncclSend)                        \
  EACH(ncclRecv)                        \
  EACH(ncclPutSignal)                   \
  EACH(ncclSignal)                      \
  EACH(ncclWaitSignal)                  \
  EACH(ncclGroupStart)                  \
  EACH(ncclGroupEnd)                    \
  EACH(ncclGroupSimulateEnd)

// Immutable, so any thread may call anything.
class Library {
 public:
  // Tried in this order: `path` if it is not empty; WEIGHTSYNC_NCCL_LIBRARY; the one
  // that this process has loaded; `fallback` if it is not empty (where a package of
  // NCCL is installed); the loader's own search. kUnsupported, with what was tried, if
  // there is none, or none from 2.29 to 2.32.
  static Result<std::shared_ptr<const Library>> open(const std::string& path,
                                                     const std::string& fallback);
  // The one behind a handle of dlopen(), which `said` names in messages.
  static Result<std::shared_ptr<const Library>> of(void* handle,
                                                   const std::string& said);

  // 23007 for 2.30.7.
  int version() const { return version_; }
  // "2.30.7".
  std::string version_text() const;
  // The file that it was loaded from.
  const std::string& path() const { return path_; }

  // What a result means: ok, or which call failed, with what NCCL says about it.
  // ncclInProgress is ok: whoever issues nonblocking calls looks for it itself.
  Status check(ncclResult_t result, const char* call) const;

  // NOLINTNEXTLINE(bugprone-macro-parentheses): a member cannot be named in parentheses
#define WEIGHTSYNC_NCCL_MEMBER(name) Function<decltype(::name)> name{#name};
  WEIGHTSYNC_NCCL_FUNCTIONS(WEIGHTSYNC_NCCL_MEMBER)
#undef WEIGHTSYNC_NCCL_MEMBER

 private:
  Library() = default;

  std::string describe(ncclResult_t result) const;

  int version_ = 0;
  std::string path_;
  Function<const char*(ncclResult_t)> error_string_{"ncclGetErrorString"};
  Function<const char*(ncclComm_t)> last_error_{"ncclGetLastError"};
};

}  // namespace weightsync::nccl
