// CUDA runtime: allocating, freeing, registering and describing memory.
#include <limits>

#include "api.h"

namespace weightsync::emulator {
namespace {

Outcome allocate_into(Machine& it, int device, Kind kind, void** address,
                      std::size_t nbytes) {
  if (address == nullptr) return missing("the pointer to the result");
  *address = nullptr;
  if (nbytes == 0) return {};
  auto made = it.memory().allocate(device, kind, nbytes);
  if (made.ok()) *address = made.value().base;
  return outcome_of(made.status());
}

// As on hardware, freeing waits for everything that might still use the memory.
Outcome free_kind(Machine& it, void* address, bool (*is_right)(Kind)) {
  if (address == nullptr) return {};
  const auto found = it.memory().find(address);
  if (!found || found->base != address || !is_right(found->kind)) {
    return invalid("asked to free " + show(address) +
                   (found ? ", which belongs to " + describe(*found)
                          : ", which is no allocation, or freed before"));
  }
  if (found->kind == Kind::kMalloc) {
    it.streams().synchronize(found->device);
  } else {
    for (int device = 0; device < it.devices(); ++device) {
      it.streams().synchronize(device);
    }
  }
  return outcome_of(it.memory().release(address));
}

bool is_device_kind(Kind kind) {
  return kind == Kind::kMalloc || kind == Kind::kManaged;
}

bool is_pinned_kind(Kind kind) { return kind == Kind::kHost; }

bool is_host_kind(Kind kind) {
  return kind == Kind::kHost || kind == Kind::kHostRegistered;
}

Outcome allocate_on(const std::shared_ptr<QueuedStream>& stream, Machine& it,
                    void** address, std::size_t nbytes) {
  return allocate_into(it, stream->device(), Kind::kMalloc, address, nbytes);
}

cudaPointerAttributes attributes_of(const void* address,
                                    const std::optional<Allocation>& found) {
  constexpr int kNoDevice = -2;
  void* const same = const_cast<void*>(address);  // NOLINT: handed back as given
  cudaPointerAttributes attributes{};
  attributes.hostPointer = same;
  attributes.device = kNoDevice;
  if (!found) return attributes;
  attributes.device = found->device;
  attributes.devicePointer = same;
  attributes.type = found->kind == Kind::kManaged ? cudaMemoryTypeManaged
                    : is_host_kind(found->kind)   ? cudaMemoryTypeHost
                                                  : cudaMemoryTypeDevice;
  if (attributes.type == cudaMemoryTypeDevice) attributes.hostPointer = nullptr;
  return attributes;
}

}  // namespace
}  // namespace weightsync::emulator

using namespace weightsync::emulator;  // NOLINT: this file is the edge

#pragma GCC visibility push(default)
extern "C" {

cudaError_t cudaMalloc(void** address, std::size_t nbytes) {
  return on_device(__func__, [&](Machine& it, int device) {
    return allocate_into(it, device, Kind::kMalloc, address, nbytes);
  });
}

cudaError_t cudaMallocManaged(void** address, std::size_t nbytes, unsigned) {
  return on_device(__func__, [&](Machine& it, int device) {
    return allocate_into(it, device, Kind::kManaged, address, nbytes);
  });
}

cudaError_t cudaHostAlloc(void** address, std::size_t nbytes, unsigned) {
  return on_device(__func__, [&](Machine& it, int device) {
    return allocate_into(it, device, Kind::kHost, address, nbytes);
  });
}

cudaError_t cudaMallocHost(void** address, std::size_t nbytes) {
  return on_device(__func__, [&](Machine& it, int device) {
    return allocate_into(it, device, Kind::kHost, address, nbytes);
  });
}

cudaError_t cudaMallocPitch(void** address, std::size_t* pitch, std::size_t width,
                            std::size_t height) {
  return on_device(__func__, [&](Machine& it, int device) -> Outcome {
    constexpr std::size_t kPitch = 512;
    if (pitch == nullptr) return missing("pitch");
    *pitch = (width + kPitch - 1) / kPitch * kPitch;
    if (height != 0 && *pitch > std::numeric_limits<std::size_t>::max() / height) {
      return invalid("the size of all rows is no number of bytes");
    }
    return allocate_into(it, device, Kind::kMalloc, address, *pitch * height);
  });
}

cudaError_t cudaFree(void* address) {
  return on_device(__func__, [&](Machine& it, int) {
    return free_kind(it, address, is_device_kind);
  });
}

cudaError_t cudaFreeHost(void* address) {
  return on_device(__func__, [&](Machine& it, int) {
    return free_kind(it, address, is_pinned_kind);
  });
}

cudaError_t cudaMallocAsync(void** address, std::size_t nbytes, cudaStream_t stream) {
  return on_stream(__func__, stream, [&](Machine& it, const auto& on) {
    return allocate_on(on, it, address, nbytes);
  });
}

cudaError_t cudaMallocFromPoolAsync(void** address, std::size_t nbytes, cudaMemPool_t,
                                    cudaStream_t stream) {
  return on_stream(__func__, stream, [&](Machine& it, const auto& on) {
    return allocate_on(on, it, address, nbytes);
  });
}

cudaError_t cudaFreeAsync(void* address, cudaStream_t stream) {
  return on_stream(__func__, stream, [&](Machine& it, const auto& on) -> Outcome {
    if (address == nullptr) return {};
    const auto found = it.memory().find(address);
    if (!found || found->base != address || found->kind != Kind::kMalloc) {
      return invalid("asked to free " + show(address) + ", which is no allocation");
    }
    on->enqueue("cudaFreeAsync",
                [&it, address] { (void)it.memory().release(address); });
    return {};
  });
}

cudaError_t cudaHostRegister(void* address, std::size_t nbytes, unsigned) {
  return on_device(__func__, [&](Machine& it, int device) -> Outcome {
    if (address == nullptr || nbytes == 0)
      return invalid("there is nothing to register");
    Allocation host;
    host.device = device;
    host.kind = Kind::kHostRegistered;
    host.base = static_cast<std::byte*>(address);
    host.nbytes = nbytes;
    const auto added = it.memory().add(std::move(host));
    if (added.ok()) return {};
    return {cudaErrorHostMemoryAlreadyRegistered, added.message()};
  });
}

cudaError_t cudaHostUnregister(void* address) {
  return on_device(__func__, [&](Machine& it, int) -> Outcome {
    const auto found = it.memory().find(address);
    if (!found || found->base != address || found->kind != Kind::kHostRegistered) {
      return {cudaErrorHostMemoryNotRegistered,
              show(address) + " is not the start of registered memory"};
    }
    for (int device = 0; device < it.devices(); ++device) {
      it.streams().synchronize(device);
    }
    it.memory().remove(address);
    return {};
  });
}

cudaError_t cudaHostGetDevicePointer(void** result, void* host, unsigned) {
  return on_device(__func__, [&](Machine& it, int) -> Outcome {
    if (result == nullptr) return missing("pDevice");
    const auto found = it.memory().find(host);
    if (!found || !is_host_kind(found->kind)) {
      return invalid(show(host) + " is no pinned or registered host memory");
    }
    *result = host;
    return {};
  });
}

cudaError_t cudaHostGetFlags(unsigned* flags, void* host) {
  return on_device(__func__, [&](Machine& it, int) -> Outcome {
    constexpr unsigned kMapped = 2;
    const auto found = it.memory().find(host);
    if (flags == nullptr || !found || !is_host_kind(found->kind)) {
      return invalid(show(host) + " is no pinned or registered host memory");
    }
    *flags = kMapped;
    return {};
  });
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  return on_device(__func__, [&](Machine& it, int device) -> Outcome {
    const MemoryUse use = it.memory().use(device);
    if (free != nullptr) *free = use.total - use.used;
    if (total != nullptr) *total = use.total;
    return {};
  });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes,
                                     const void* address) {
  return on_device(__func__, [&](Machine& it, int) -> Outcome {
    if (attributes == nullptr) return missing("attributes");
    *attributes = attributes_of(address, it.memory().find(address));
    return {};
  });
}

}  // extern "C"
#pragma GCC visibility pop
