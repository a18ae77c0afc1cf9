#include "failure.h"

#include "emulator/core.h"
#include "emulator/cuda_runtime_functions.h"

namespace weightsync::emulator {
namespace {

struct Reason {
  CUresult code = CUDA_SUCCESS;
  std::string text;
};

Reason& reason_of_thread() {
  thread_local Reason reason;
  return reason;
}

}  // namespace

CUresult fail(const char* function, CUresult code, const std::string& reason) {
  const char* const words = cudaGetErrorString(static_cast<cudaError_t>(code));
  reason_of_thread() = {code, std::string(words) + " (weightsync emulator: " +
                                  function + ": " + reason + ")"};
  return code;
}

CUresult begin(const char* function) {
  count_call(function);
  const int code = filtered_code(function);
  if (code == 0) return CUDA_SUCCESS;
  return fail(function, static_cast<CUresult>(code), "as a fault asks");
}

CUresult answer(const char* function, const shm::Status& status) {
  if (status.ok()) return CUDA_SUCCESS;
  const bool wrong = status.code() == shm::Code::kInvalid;
  return fail(function, wrong ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_OUT_OF_MEMORY,
              status.message());
}

CUresult check_driver_device(const char* function, int device) {
  if (device >= 0 && device < device_count()) return CUDA_SUCCESS;
  return fail(function, CUDA_ERROR_INVALID_DEVICE,
              "asked for device " + std::to_string(device) + " of " +
                  std::to_string(device_count()));
}

}  // namespace weightsync::emulator

using namespace weightsync::emulator;  // NOLINT: this file is the edge

#pragma GCC visibility push(default)
extern "C" {

CUresult cuGetErrorString(CUresult error, const char** text) {
  if (text == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const Reason& reason = reason_of_thread();
  const bool is_last = error != CUDA_SUCCESS && reason.code == error;
  *text = is_last ? reason.text.c_str()
                  : cudaGetErrorString(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char** text) {
  if (text == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *text = cudaGetErrorName(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}

}  // extern "C"
#pragma GCC visibility pop
