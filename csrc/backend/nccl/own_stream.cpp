#include "backend/nccl/own_stream.h"

#include <c10/core/DeviceGuard.h>

#include <cstdint>

#include "backend/nccl/raising.h"
#include "cuda/runtime.h"

namespace weightsync {
namespace {

constexpr unsigned kNonBlocking = 1;  // cudaStreamNonBlocking
constexpr int kHigh = -1;

// As c10::cuda::getStreamFromExternal: a handle is its own number.
c10::Stream as_torch(c10::Device device, cudaStream_t handle) {
  return c10::Stream(
      c10::Stream::UNSAFE, device,
      static_cast<c10::StreamId>(reinterpret_cast<std::intptr_t>(handle)));
}

}  // namespace

OwnStream::OwnStream(c10::Device device, cudaStream_t handle)
    : handle_(handle), stream_(as_torch(device, handle)) {}

std::shared_ptr<OwnStream> OwnStream::make(c10::Device device, bool high_priority) {
  const c10::DeviceGuard on(device);
  const cuda::Runtime& runtime = cuda::runtime();
  cudaStream_t handle = nullptr;
  raise(runtime.check(runtime.stream_create_with_priority(&handle, kNonBlocking,
                                                          high_priority ? kHigh : 0),
                      "cudaStreamCreateWithPriority"));
  return std::shared_ptr<OwnStream>(new OwnStream(device, handle));
}

// What it still has to do it does.
OwnStream::~OwnStream() {
  if (!left_) (void)cuda::runtime().stream_destroy(handle_);
}

}  // namespace weightsync
