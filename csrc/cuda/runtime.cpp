#include "cuda/runtime.h"

#include <string>

namespace weightsync::cuda {

using shm::Code;
using shm::Status;

Status Runtime::check(cudaError_t error, const char* call) const {
  if (error == cudaSuccess) return {};
  const auto number = static_cast<int>(error);
  if (number == kMissingFunction) {
    return {Code::kUnsupported,
            std::string(call) + " is not to be had: this process has no CUDA runtime"};
  }
  const char* const words = error_string(error);
  return {Code::kSystem, std::string(call) + " failed: " +
                             (words == nullptr ? "unknown error" : words) + " (" +
                             std::to_string(number) + ")"};
}

const Runtime& runtime() {
  static const Runtime* const found = [] {
    auto* const made = new Runtime();
    made->set_device.find(RTLD_DEFAULT);
    made->memcpy_async.find(RTLD_DEFAULT);
    made->memcpy_2d_async.find(RTLD_DEFAULT);
    made->memset_async.find(RTLD_DEFAULT);
    made->launch_host_func.find(RTLD_DEFAULT);
    made->stream_create_with_priority.find(RTLD_DEFAULT);
    made->stream_destroy.find(RTLD_DEFAULT);
    made->thread_exchange_capture_mode.find(RTLD_DEFAULT);
    made->host_register.find(RTLD_DEFAULT);
    made->host_unregister.find(RTLD_DEFAULT);
    made->get_last_error.find(RTLD_DEFAULT);
    made->device_synchronize.find(RTLD_DEFAULT);
    made->stream_synchronize.find(RTLD_DEFAULT);
    made->driver_entry_point.find(RTLD_DEFAULT);
    made->error_string.find(RTLD_DEFAULT);
    return made;
  }();
  return *found;
}

Status bind_device(int device) {
  return runtime().check(runtime().set_device(device), "cudaSetDevice");
}

}  // namespace weightsync::cuda
