// CUDA driver: start, devices, contexts, and functions by name.
//
// Every device has one context, its primary one, which is always active. The current
// context of a thread is that of its current device.
#include <dlfcn.h>

#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "emulator/cuda_runtime_functions.h"
#include "emulator/device_traits.h"
#include "failure.h"

namespace weightsync::emulator {
namespace {

struct Context {
  int device = 0;
};

constexpr int kMostContexts = 64;

CUcontext context_of(int device) {
  static auto* const contexts = [] {
    auto* const made = new std::array<Context, kMostContexts>();
    for (int each = 0; each < kMostContexts; ++each) (*made)[each].device = each;
    return made;
  }();
  return reinterpret_cast<CUcontext>(&contexts->at(device));
}

CUresult enter(const char* function, CUcontext context) {
  if (context == nullptr) return CUDA_SUCCESS;
  for (int device = 0; device < device_count(); ++device) {
    if (context == context_of(device)) {
      return answer(function, set_current_device(device));
    }
  }
  return fail(function, CUDA_ERROR_INVALID_CONTEXT, "this is no context of a device");
}

std::vector<int>& pushed() {
  thread_local std::vector<int> devices;
  return devices;
}

CUresult nothing(const char* function) {
  return fail(function, CUDA_ERROR_INVALID_VALUE, "an argument is null");
}

}  // namespace
}  // namespace weightsync::emulator

using namespace weightsync::emulator;  // NOLINT: this file is the edge

#pragma GCC visibility push(default)
extern "C" {

CUresult cuInit(unsigned) {
  if (device_count() > 0) return CUDA_SUCCESS;
  constexpr auto kNoDevice = static_cast<CUresult>(cudaErrorNoDevice);
  return fail(__func__, kNoDevice, "the emulated machine has no device");
}

CUresult cuDriverGetVersion(int* version) {
  if (version == nullptr) return nothing(__func__);
  *version = kCudaVersion;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  if (count == nullptr) return nothing(__func__);
  *count = device_count();
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (device == nullptr) return nothing(__func__);
  const CUresult known = check_driver_device(__func__, ordinal);
  if (known == CUDA_SUCCESS) *device = ordinal;
  return known;
}

CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  if (name == nullptr || length <= 0) return nothing(__func__);
  const CUresult known = check_driver_device(__func__, device);
  if (known != CUDA_SUCCESS) return known;
  std::strncpy(name, kDeviceName, length);
  name[length - 1] = '\0';
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(cudaUUID_t* uuid, CUdevice device) {
  if (uuid == nullptr) return nothing(__func__);
  const CUresult known = check_driver_device(__func__, device);
  if (known != CUDA_SUCCESS) return known;
  std::memcpy(uuid->bytes, device_uuid(device).data(), sizeof uuid->bytes);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(cudaUUID_t* uuid, CUdevice device) {
  return cuDeviceGetUuid_v2(uuid, device);
}

CUresult cuDeviceTotalMem_v2(std::size_t* nbytes, CUdevice device) {
  if (nbytes == nullptr) return nothing(__func__);
  const CUresult known = check_driver_device(__func__, device);
  if (known == CUDA_SUCCESS) *nbytes = memory_use(device).total;
  return known;
}

CUresult cuDeviceTotalMem(std::size_t* nbytes, CUdevice device) {
  return cuDeviceTotalMem_v2(nbytes, device);
}

CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
  if (value == nullptr) return nothing(__func__);
  const CUresult known = check_driver_device(__func__, device);
  if (known == CUDA_SUCCESS) *value = device_attribute(device, attribute);
  return known;
}

CUresult cuDeviceGetPCIBusId(char* id, int length, CUdevice device) {
  if (id == nullptr || length <= 0) return nothing(__func__);
  const CUresult known = check_driver_device(__func__, device);
  if (known != CUDA_SUCCESS) return known;
  std::strncpy(id, pci_bus_id(device).c_str(), length);
  id[length - 1] = '\0';
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetByPCIBusId(CUdevice* device, const char* id) {
  if (device == nullptr || id == nullptr) return nothing(__func__);
  const int found = device_of_bus_id(id);
  if (found < 0) return check_driver_device(__func__, found);
  *device = found;
  return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  if (can == nullptr) return nothing(__func__);
  CUresult known = check_driver_device(__func__, device);
  if (known == CUDA_SUCCESS) known = check_driver_device(__func__, peer);
  if (known == CUDA_SUCCESS) *can = device == peer ? 0 : 1;
  return known;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  const CUresult known = check_driver_device(__func__, device);
  if (known != CUDA_SUCCESS) return known;
  if (flags != nullptr) *flags = 0;
  if (active != nullptr) *active = 1;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  if (context == nullptr) return nothing(__func__);
  const CUresult known = check_driver_device(__func__, device);
  if (known == CUDA_SUCCESS) *context = context_of(device);
  return known;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  return check_driver_device(__func__, device);
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  return check_driver_device(__func__, device);
}

CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned) {
  return check_driver_device(__func__, device);
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  if (context == nullptr) return nothing(__func__);
  *context = device_count() > 0 ? context_of(current_device()) : nullptr;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) { return enter(__func__, context); }

CUresult cuCtxPushCurrent_v2(CUcontext context) {
  const int before = current_device();
  const CUresult entered = enter(__func__, context);
  if (entered == CUDA_SUCCESS) pushed().push_back(before);
  return entered;
}

CUresult cuCtxPushCurrent(CUcontext context) { return cuCtxPushCurrent_v2(context); }

CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  if (pushed().empty()) {
    return fail(__func__, CUDA_ERROR_INVALID_CONTEXT, "no context was pushed");
  }
  if (context != nullptr) *context = context_of(current_device());
  const int before = pushed().back();
  pushed().pop_back();
  return answer(__func__, set_current_device(before));
}

CUresult cuCtxPopCurrent(CUcontext* context) { return cuCtxPopCurrent_v2(context); }

CUresult cuCtxGetDevice(CUdevice* device) {
  if (device == nullptr) return nothing(__func__);
  *device = current_device();
  return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize() { return static_cast<CUresult>(cudaDeviceSynchronize()); }

CUresult cuCtxGetApiVersion(CUcontext, unsigned* version) {
  if (version == nullptr) return nothing(__func__);
  *version = kCudaVersion;
  return CUDA_SUCCESS;
}

// The newest version of a function has the name with the highest suffix.
CUresult cuGetProcAddress_v2(const char* symbol, void** function, int, std::uint64_t,
                             int* status) {
  static void* const self = [] {
    Dl_info info{};
    ::dladdr(reinterpret_cast<const void*>(&cuInit), &info);
    void* const library = ::dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    return library != nullptr ? library : ::dlopen(nullptr, RTLD_NOW);
  }();
  if (symbol == nullptr || function == nullptr) return nothing(__func__);
  *function = ::dlsym(self, (std::string(symbol) + "_v2").c_str());
  if (*function == nullptr) *function = ::dlsym(self, symbol);
  if (status != nullptr) *status = *function == nullptr ? 1 : 0;
  if (*function != nullptr) return CUDA_SUCCESS;
  constexpr auto kNotFound = static_cast<CUresult>(cudaErrorSymbolNotFound);
  return fail(__func__, kNotFound, std::string("there is no ") + symbol);
}

CUresult cuGetProcAddress(const char* symbol, void** function, int version,
                          std::uint64_t flags) {
  return cuGetProcAddress_v2(symbol, function, version, flags, nullptr);
}

}  // extern "C"
#pragma GCC visibility pop
