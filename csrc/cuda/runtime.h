// Runtime: the few functions of CUDA's runtime that torch's own interfaces do not
// offer.
//
// They are those of the runtime that this process has loaded, torch's. Where there is
// none (a CPU-only torch), each call fails with kMissingFunction.
#pragma once

#include <cstddef>

#include "cuda/abi.h"
#include "cuda/function.h"
#include "shm/status.h"

namespace weightsync::cuda {

struct Runtime {
  Function<cudaError_t(int)> set_device{"cudaSetDevice"};
  Function<cudaError_t(void*, const void*, std::size_t, cudaMemcpyKind, cudaStream_t)>
      memcpy_async{"cudaMemcpyAsync"};
  Function<cudaError_t(void*, std::size_t, const void*, std::size_t, std::size_t,
                       std::size_t, cudaMemcpyKind, cudaStream_t)>
      memcpy_2d_async{"cudaMemcpy2DAsync"};
  Function<cudaError_t(void*, int, std::size_t, cudaStream_t)> memset_async{
      "cudaMemsetAsync"};
  Function<cudaError_t(cudaStream_t, cudaHostFn_t, void*)> launch_host_func{
      "cudaLaunchHostFunc"};
  Function<cudaError_t(cudaStream_t*, unsigned, int)> stream_create_with_priority{
      "cudaStreamCreateWithPriority"};
  Function<cudaError_t(cudaStream_t)> stream_destroy{"cudaStreamDestroy"};
  Function<cudaError_t(cudaStreamCaptureMode*)> thread_exchange_capture_mode{
      "cudaThreadExchangeStreamCaptureMode"};
  Function<cudaError_t(void*, std::size_t, unsigned)> host_register{"cudaHostRegister"};
  Function<cudaError_t(void*)> host_unregister{"cudaHostUnregister"};
  Function<cudaError_t()> get_last_error{"cudaGetLastError"};
  Function<cudaError_t()> device_synchronize{"cudaDeviceSynchronize"};
  Function<cudaError_t(cudaStream_t)> stream_synchronize{"cudaStreamSynchronize"};
  Function<cudaError_t(const char*, void**, unsigned, unsigned long long,
                       cudaDriverEntryPointQueryResult*)>
      driver_entry_point{"cudaGetDriverEntryPointByVersion"};
  Function<const char*(cudaError_t)> error_string{"cudaGetErrorString"};

  // kUnsupported without the function, else kSystem with what CUDA says.
  shm::Status check(cudaError_t error, const char* call) const;
};

// Of this process, found at the first call.
const Runtime& runtime();

// Makes it the calling thread's device.
shm::Status bind_device(int device);

}  // namespace weightsync::cuda
