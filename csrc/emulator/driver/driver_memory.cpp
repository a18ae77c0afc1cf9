// CUDA driver: virtual memory management, and what is known of an address.
#include <cstring>
#include <optional>

#include "emulator/vmm.h"
#include "failure.h"

namespace weightsync::emulator {
namespace {

constexpr int kPosixDescriptor = 1;  // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
constexpr int kDevice = 1;           // CU_MEM_LOCATION_TYPE_DEVICE
constexpr int kPinned = 1;           // CU_MEM_ALLOCATION_TYPE_PINNED

void* pointer(CUdeviceptr address) {
  return reinterpret_cast<void*>(address);  // NOLINT: an address it is
}

CUresult nothing(const char* function) {
  return fail(function, CUDA_ERROR_INVALID_VALUE, "an argument is null");
}

// CU_POINTER_ATTRIBUTE_...
enum Attribute : int {
  kContext = 1,
  kMemoryType = 2,
  kDevicePointer = 3,
  kHostPointer = 4,
  kSyncMemops = 6,
  kBufferId = 7,
  kIsManaged = 8,
  kDeviceOrdinal = 9,
  kIsLegacyIpcCapable = 10,
  kRangeStart = 11,
  kRangeSize = 12,
  kMapped = 13,
  kAllowedHandleTypes = 14,
  kIsGpuDirectCapable = 15,
  kAccessFlags = 16,
};

template <class Value>
bool give(void* result, Value value) {
  std::memcpy(result, static_cast<const void*>(&value), sizeof value);
  return true;
}

// False: there is no such attribute.
bool give_attribute(void* result, int attribute, CUdeviceptr address,
                    const Allocation& found) {
  constexpr unsigned kHostType = 1;
  constexpr unsigned kDeviceType = 2;
  constexpr unsigned kReadWrite = 3;
  const bool on_device = is_device_memory(found.kind);
  switch (attribute) {
    case kMemoryType:
      return give(result, on_device ? kDeviceType : kHostType);
    case kDevicePointer:
      return give(result, address);
    case kHostPointer:
      return give(result, on_device ? nullptr : pointer(address));
    case kSyncMemops:
    case kIsGpuDirectCapable:
      return give(result, 0);
    case kBufferId:
      return give(result, static_cast<unsigned long long>(found.id));
    case kIsManaged:
      return give(result, static_cast<unsigned>(found.kind == Kind::kManaged));
    case kDeviceOrdinal:
      return give(result, found.device);
    case kIsLegacyIpcCapable:
      return give(result, static_cast<unsigned>(found.kind == Kind::kMalloc));
    case kRangeStart:
      return give(result, found.base);
    case kRangeSize:
      return give(result, found.nbytes);
    case kMapped:
      return give(result, 1U);
    case kAllowedHandleTypes:
      return give(result, found.kind == Kind::kVmm ? 1ULL : 0ULL);
    case kAccessFlags:
      return give(result, kReadWrite);
    default:
      return false;
  }
}

CUresult check_traits(const char* function, const CUmemAllocationProp& prop) {
  if (prop.type != kPinned || prop.location.type != kDevice) {
    return fail(function, CUDA_ERROR_NOT_SUPPORTED,
                "only pinned memory of a device is emulated; asked for type " +
                    std::to_string(prop.type) + " at location type " +
                    std::to_string(prop.location.type));
  }
  if ((prop.requestedHandleTypes & ~kPosixDescriptor) != 0) {
    return fail(function, CUDA_ERROR_NOT_SUPPORTED,
                "only POSIX descriptors are emulated; asked for handle types " +
                    std::to_string(prop.requestedHandleTypes));
  }
  return check_driver_device(function, prop.location.id);
}

}  // namespace
}  // namespace weightsync::emulator

using namespace weightsync::emulator;  // NOLINT: this file is the edge

#pragma GCC visibility push(default)
extern "C" {

CUresult cuMemGetAllocationGranularity(std::size_t* granularity,
                                       const CUmemAllocationProp* prop, int) {
  if (const CUresult begun = begin(__func__); begun != CUDA_SUCCESS) return begun;
  if (granularity == nullptr || prop == nullptr) return nothing(__func__);
  const CUresult fits = check_traits(__func__, *prop);
  if (fits == CUDA_SUCCESS) *granularity = kVmmGranularity;
  return fits;
}

CUresult cuMemAddressReserve(CUdeviceptr* address, std::size_t nbytes,
                             std::size_t alignment, CUdeviceptr, unsigned long long) {
  if (const CUresult begun = begin(__func__); begun != CUDA_SUCCESS) return begun;
  if (address == nullptr) return nothing(__func__);
  auto reserved = vmm_reserve(nbytes, alignment);
  if (reserved.ok()) *address = reinterpret_cast<CUdeviceptr>(reserved.value());
  return answer(__func__, reserved.status());
}

CUresult cuMemAddressFree(CUdeviceptr address, std::size_t nbytes) {
  if (const CUresult begun = begin(__func__); begun != CUDA_SUCCESS) return begun;
  return answer(__func__, vmm_free_range(pointer(address), nbytes));
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, std::size_t nbytes,
                     const CUmemAllocationProp* prop, unsigned long long) {
  if (const CUresult begun = begin(__func__); begun != CUDA_SUCCESS) return begun;
  if (handle == nullptr || prop == nullptr) return nothing(__func__);
  const CUresult fits = check_traits(__func__, *prop);
  if (fits != CUDA_SUCCESS) return fits;
  auto made = vmm_create({prop->location.id, nbytes, prop->requestedHandleTypes});
  if (made.ok()) *handle = made.value();
  return answer(__func__, made.status());
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  if (const CUresult begun = begin(__func__); begun != CUDA_SUCCESS) return begun;
  return answer(__func__, vmm_release(handle));
}

CUresult cuMemMap(CUdeviceptr address, std::size_t nbytes, std::size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long) {
  if (const CUresult begun = begin(__func__); begun != CUDA_SUCCESS) return begun;
  return answer(__func__, vmm_map(pointer(address), nbytes, offset, handle));
}

CUresult cuMemUnmap(CUdeviceptr address, std::size_t nbytes) {
  if (const CUresult begun = begin(__func__); begun != CUDA_SUCCESS) return begun;
  return answer(__func__, vmm_unmap(pointer(address), nbytes));
}

// Host and device reach memory at the same address, so the access of all is the widest
// of any.
CUresult cuMemSetAccess(CUdeviceptr address, std::size_t nbytes,
                        const CUmemAccessDesc* wanted, std::size_t count) {
  if (const CUresult begun = begin(__func__); begun != CUDA_SUCCESS) return begun;
  if (wanted == nullptr || count == 0) return nothing(__func__);
  int flags = 0;
  for (std::size_t each = 0; each < count; ++each) flags |= wanted[each].flags;
  constexpr int kReadWrite = 3;
  const VmmAccess access = flags == kReadWrite ? VmmAccess::kReadWrite
                           : flags != 0        ? VmmAccess::kRead
                                               : VmmAccess::kNone;
  return answer(__func__, vmm_set_access(pointer(address), nbytes, access));
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle,
                                     void* address) {
  if (const CUresult begun = begin(__func__); begun != CUDA_SUCCESS) return begun;
  if (handle == nullptr) return nothing(__func__);
  auto retained = vmm_retain(address);
  if (retained.ok()) *handle = retained.value();
  return answer(__func__, retained.status());
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* prop,
                                                CUmemGenericAllocationHandle handle) {
  const std::optional<VmmTraits> traits = vmm_traits(handle);
  if (prop == nullptr || !traits) return nothing(__func__);
  *prop = {};
  prop->type = kPinned;
  prop->requestedHandleTypes = traits->handle_types;
  prop->location = {kDevice, traits->device};
  return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void* result, CUmemGenericAllocationHandle handle,
                                      int type, unsigned long long) {
  if (result == nullptr) return nothing(__func__);
  const std::optional<VmmTraits> traits = vmm_traits(handle);
  if (type != kPosixDescriptor || !traits || (traits->handle_types & type) == 0) {
    return fail(__func__, CUDA_ERROR_INVALID_VALUE,
                "the memory was not created to be exported as handle type " +
                    std::to_string(type));
  }
  auto fd = vmm_export(handle);
  if (fd.ok()) std::memcpy(result, &fd.value(), sizeof(int));
  return answer(__func__, fd.status());
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle,
                                        void* os_handle, int type) {
  if (handle == nullptr) return nothing(__func__);
  if (type != kPosixDescriptor) {
    return fail(__func__, CUDA_ERROR_NOT_SUPPORTED,
                "asked to import handle type " + std::to_string(type));
  }
  // A descriptor is passed as the pointer itself.
  const auto fd = static_cast<int>(reinterpret_cast<std::intptr_t>(os_handle));
  auto imported = vmm_import(fd);
  if (imported.ok()) *handle = imported.value();
  return answer(__func__, imported.status());
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, std::size_t* nbytes,
                                 CUdeviceptr address) {
  const std::optional<Allocation> found = find_allocation(pointer(address));
  if (!found) {
    constexpr auto kNotFound = static_cast<CUresult>(cudaErrorSymbolNotFound);
    return fail(__func__, kNotFound, "the address is in no memory that CUDA knows");
  }
  if (base != nullptr) *base = reinterpret_cast<CUdeviceptr>(found->base);
  if (nbytes != nullptr) *nbytes = found->nbytes;
  return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange(CUdeviceptr* base, std::size_t* nbytes,
                              CUdeviceptr address) {
  return cuMemGetAddressRange_v2(base, nbytes, address);
}

CUresult cuPointerGetAttribute(void* result, int attribute, CUdeviceptr address) {
  if (const CUresult begun = begin(__func__); begun != CUDA_SUCCESS) return begun;
  if (result == nullptr) return nothing(__func__);
  const std::optional<Allocation> found = find_allocation(pointer(address));
  if (found && give_attribute(result, attribute, address, *found)) return CUDA_SUCCESS;
  return fail(__func__, CUDA_ERROR_INVALID_VALUE,
              found ? "there is no attribute " + std::to_string(attribute)
                    : "the address is in no memory that CUDA knows");
}

// Unknown addresses are no failure here: every attribute is then 0.
CUresult cuPointerGetAttributes(unsigned count, const int* attributes, void** results,
                                CUdeviceptr address) {
  if (const CUresult begun = begin(__func__); begun != CUDA_SUCCESS) return begun;
  if (attributes == nullptr || results == nullptr) return nothing(__func__);
  const std::optional<Allocation> found = find_allocation(pointer(address));
  for (unsigned each = 0; each < count; ++each) {
    if (!found) {
      std::memset(results[each], 0, sizeof(int));
    } else if (!give_attribute(results[each], attributes[each], address, *found)) {
      return fail(__func__, CUDA_ERROR_INVALID_VALUE,
                  "there is no attribute " + std::to_string(attributes[each]));
    }
  }
  return CUDA_SUCCESS;
}

CUresult cuPointerSetAttribute(const void*, int, CUdeviceptr) { return CUDA_SUCCESS; }

}  // extern "C"
#pragma GCC visibility pop
