// CUDA runtime: copies and memsets.
#include "api.h"
#include "copy.h"

namespace weightsync::emulator {
namespace {

Copy rows(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
          std::size_t width, std::size_t height, cudaMemcpyKind kind) {
  return {static_cast<std::byte*>(to),
          to_pitch,
          static_cast<const std::byte*>(from),
          from_pitch,
          width,
          height,
          kind};
}

cudaError_t copy_now(const char* function, const Copy& copy) {
  return on_stream(function, nullptr, [&](Machine& it, const auto& stream) {
    return copy_on(it, stream, function, copy, Wait::kUnlessOnDevice);
  });
}

cudaError_t copy_later(const char* function, const Copy& copy, cudaStream_t handle) {
  return on_stream(function, handle, [&](Machine& it, const auto& stream) {
    return copy_on(it, stream, function, copy, Wait::kNo);
  });
}

cudaError_t fill_later(const char* function, const Fill& fill, cudaStream_t handle) {
  return on_stream(function, handle, [&](Machine& it, const auto& stream) {
    return fill_on(it, stream, function, fill);
  });
}

Fill fill_of(void* to, int value, std::size_t nbytes) {
  return {static_cast<std::byte*>(to), nbytes, value, nbytes, 1};
}

// That the two addresses belong to the devices that the caller says they do.
Outcome check_peers(Machine& it, const void* to, int to_device, const void* from,
                    int from_device) {
  for (const auto& [address, device] :
       {std::pair(to, to_device), {from, from_device}}) {
    if (Outcome usable = it.check(device); !usable.ok()) return usable;
    const auto found = it.memory().find(address);
    if (!found) return invalid(show(address) + " is no memory of a device");
    if (is_device_memory(found->kind) && found->device != device) {
      return invalid("device " + std::to_string(device) + " was named for " +
                     show(address) + ", which is in " + describe(*found));
    }
  }
  return {};
}

}  // namespace
}  // namespace weightsync::emulator

using namespace weightsync::emulator;  // NOLINT: this file is the edge

#pragma GCC visibility push(default)
extern "C" {

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t nbytes,
                       cudaMemcpyKind kind) {
  return copy_now(__func__, copy_of(to, from, nbytes, kind));
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t nbytes,
                            cudaMemcpyKind kind, cudaStream_t stream) {
  return copy_later(__func__, copy_of(to, from, nbytes, kind), stream);
}

cudaError_t cudaMemcpy2D(void* to, std::size_t to_pitch, const void* from,
                         std::size_t from_pitch, std::size_t width, std::size_t height,
                         cudaMemcpyKind kind) {
  return copy_now(__func__, rows(to, to_pitch, from, from_pitch, width, height, kind));
}

cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from,
                              std::size_t from_pitch, std::size_t width,
                              std::size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream) {
  return copy_later(__func__, rows(to, to_pitch, from, from_pitch, width, height, kind),
                    stream);
}

cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from,
                                int from_device, std::size_t nbytes,
                                cudaStream_t handle) {
  return on_stream(__func__, handle, [&](Machine& it, const auto& stream) -> Outcome {
    if (nbytes == 0) return {};
    Outcome peers = check_peers(it, to, to_device, from, from_device);
    if (!peers.ok()) return peers;
    const Copy copy = copy_of(to, from, nbytes, cudaMemcpyDefault);
    return copy_on(it, stream, "cudaMemcpyPeerAsync", copy, Wait::kNo);
  });
}

cudaError_t cudaMemcpyPeer(void* to, int to_device, const void* from, int from_device,
                           std::size_t nbytes) {
  return cudaMemcpyPeerAsync(to, to_device, from, from_device, nbytes, nullptr);
}

cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from,
                                 const std::size_t* sizes, std::size_t count, void*,
                                 std::size_t*, std::size_t, cudaStream_t handle) {
  return on_stream(__func__, handle, [&](Machine& it, const auto& stream) -> Outcome {
    if (to == nullptr || from == nullptr || sizes == nullptr) return missing("a list");
    for (std::size_t each = 0; each < count; ++each) {
      const Copy copy = copy_of(to[each], from[each], sizes[each], cudaMemcpyDefault);
      Outcome done = copy_on(it, stream, "cudaMemcpyBatchAsync", copy, Wait::kNo);
      if (!done.ok()) return done;
    }
    return {};
  });
}

cudaError_t cudaMemset(void* to, int value, std::size_t nbytes) {
  return fill_later(__func__, fill_of(to, value, nbytes), nullptr);
}

cudaError_t cudaMemsetAsync(void* to, int value, std::size_t nbytes,
                            cudaStream_t stream) {
  return fill_later(__func__, fill_of(to, value, nbytes), stream);
}

cudaError_t cudaMemset2D(void* to, std::size_t pitch, int value, std::size_t width,
                         std::size_t height) {
  return fill_later(
      __func__, {static_cast<std::byte*>(to), pitch, value, width, height}, nullptr);
}

cudaError_t cudaMemset2DAsync(void* to, std::size_t pitch, int value, std::size_t width,
                              std::size_t height, cudaStream_t stream) {
  return fill_later(__func__,
                    {static_cast<std::byte*>(to), pitch, value, width, height}, stream);
}

}  // extern "C"
#pragma GCC visibility pop
