// raise: a Status of the torch-free parts as the exception that users of c10d expect.
#pragma once

#include <c10/util/Exception.h>

#include <string>

#include "backend/status_error.h"
#include "shm/status.h"

namespace weightsync {

// kInvalid: ValueError; kClosed, kUnsupported and kCancelled: ours, as for windows; all
// else: DistBackendError, which is a RuntimeError.
inline void raise(const shm::Status& status) {
  switch (status.code()) {
    case shm::Code::kOk:
      return;
    case shm::Code::kInvalid:
      TORCH_CHECK_VALUE(false, status.message());
    case shm::Code::kClosed:
    case shm::Code::kUnsupported:
    case shm::Code::kCancelled:
      throw StatusError(status);
    default:
      TORCH_CHECK_WITH(DistBackendError, false, status.message());
  }
}

}  // namespace weightsync
