// Virtual memory management, as the runtime library gives it to the driver library.
//
// Every size, offset and address is a multiple of kVmmGranularity. Memory is created
// without an address (a handle), mapped into a reserved range, and usable once access
// was set. A handle is closed with vmm_release(); what is mapped stays. Any thread may
// call anything. kInvalid: what was asked is wrong; kSystem: out of memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "emulator/core.h"

namespace weightsync::emulator {

using VmmHandle = std::uint64_t;  // never 0

struct VmmTraits {
  int device = 0;
  std::size_t nbytes = 0;
  int handle_types = 0;  // CUmemAllocationHandleType asked for
};

enum class VmmAccess : std::uint8_t { kNone, kRead, kReadWrite };

WEIGHTSYNC_EMULATOR_EXPORT shm::Result<void*> vmm_reserve(std::size_t nbytes,
                                                          std::size_t alignment);
WEIGHTSYNC_EMULATOR_EXPORT shm::Status vmm_free_range(void* base, std::size_t nbytes);

WEIGHTSYNC_EMULATOR_EXPORT shm::Result<VmmHandle> vmm_create(const VmmTraits& traits);
WEIGHTSYNC_EMULATOR_EXPORT shm::Status vmm_release(VmmHandle handle);
WEIGHTSYNC_EMULATOR_EXPORT std::optional<VmmTraits> vmm_traits(VmmHandle handle);
// One more reference to the handle of what is mapped at this address. kInvalid for
// other memory, such as that of cudaMalloc.
WEIGHTSYNC_EMULATOR_EXPORT shm::Result<VmmHandle> vmm_retain(const void* address);

WEIGHTSYNC_EMULATOR_EXPORT shm::Status vmm_map(void* address, std::size_t nbytes,
                                               std::size_t offset, VmmHandle handle);
// Waits for the streams of the device first.
WEIGHTSYNC_EMULATOR_EXPORT shm::Status vmm_unmap(void* address, std::size_t nbytes);
WEIGHTSYNC_EMULATOR_EXPORT shm::Status vmm_set_access(void* address, std::size_t nbytes,
                                                      VmmAccess access);

// A new descriptor, which the caller closes.
WEIGHTSYNC_EMULATOR_EXPORT shm::Result<int> vmm_export(VmmHandle handle);
// The descriptor stays the caller's.
WEIGHTSYNC_EMULATOR_EXPORT shm::Result<VmmHandle> vmm_import(int fd);

}  // namespace weightsync::emulator
