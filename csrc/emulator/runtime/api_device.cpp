// CUDA runtime: devices, versions, limits and peers.
#include <cstring>

#include "api.h"
#include "emulator/device_traits.h"

namespace weightsync::emulator {
namespace {

// What a program may set and read back, and nothing heeds.
struct Settings {
  unsigned flags = 0;
  std::size_t limits[8] = {1024, 1 << 20, 8 << 20, 2, 2048, 64, 0, 0};
};

Settings& settings() {
  static auto* const of_process = new Settings();
  return *of_process;
}

void describe_device(Machine& it, int device, cudaDeviceProp& p) {
  const auto value = [device](int attribute) {
    return device_attribute(device, attribute);
  };
  p = {};
  std::strncpy(p.name, kDeviceName, sizeof p.name - 1);
  std::memcpy(p.uuid.bytes, device_uuid(device).data(), sizeof p.uuid.bytes);
  p.totalGlobalMem = it.memory().use(device).total;
  p.maxThreadsPerBlock = value(1);
  for (int axis = 0; axis < 3; ++axis) p.maxThreadsDim[axis] = value(2 + axis);
  for (int axis = 0; axis < 3; ++axis) p.maxGridSize[axis] = value(5 + axis);
  p.sharedMemPerBlock = value(8);
  p.totalConstMem = value(9);
  p.warpSize = value(10);
  p.memPitch = value(11);
  p.regsPerBlock = value(12);
  p.textureAlignment = value(14);
  p.multiProcessorCount = value(16);
  p.canMapHostMemory = value(19);
  p.concurrentKernels = value(31);
  p.pciBusID = value(33);
  p.memoryBusWidth = value(37);
  p.l2CacheSize = value(38);
  p.maxThreadsPerMultiProcessor = value(39);
  p.asyncEngineCount = value(40);
  p.unifiedAddressing = value(41);
  p.texturePitchAlignment = value(51);
  p.major = value(75);
  p.minor = value(76);
  p.streamPrioritiesSupported = value(78);
  p.globalL1CacheSupported = value(79);
  p.localL1CacheSupported = value(80);
  p.sharedMemPerMultiprocessor = value(81);
  p.regsPerMultiprocessor = value(82);
  p.managedMemory = value(83);
  p.canUseHostPointerForRegisteredMem = value(91);
  p.cooperativeLaunch = value(95);
  p.sharedMemPerBlockOptin = value(97);
  p.hostRegisterSupported = value(99);
  p.maxBlocksPerMultiProcessor = value(106);
  p.reservedSharedMemPerBlock = value(111);
  p.memoryPoolsSupported = value(115);
  p.clusterLaunch = value(120);
  p.ipcEventSupported = value(125);
  p.hostNumaId = value(134);
}

// `body` for functions about a device that is given.
template <class Body>
cudaError_t about(const char* function, int device, Body body) {
  if (Outcome asked = asked_to_fail(function); !asked.ok()) {
    return finish(function, asked);
  }
  if (Outcome usable = machine().check(device); !usable.ok()) {
    return finish(function, usable);
  }
  return finish(function, body(machine()));
}

}  // namespace
}  // namespace weightsync::emulator

using namespace weightsync::emulator;  // NOLINT: this file is the edge

#pragma GCC visibility push(default)
extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  if (count == nullptr) return finish(__func__, missing("count"));
  *count = machine().devices();
  const Outcome usable = machine().check_process();
  if (!usable.ok()) *count = 0;
  return finish(__func__, usable);
}

cudaError_t cudaGetDevice(int* device) {
  return anywhere(__func__, [&]() -> Outcome {
    if (device == nullptr) return missing("device");
    *device = chosen_device();
    return {};
  });
}

cudaError_t cudaSetDevice(int device) {
  return anywhere(__func__, [&] { return choose_device(device); });
}

cudaError_t cudaInitDevice(int device, unsigned, unsigned) {
  return about(__func__, device, [](Machine&) { return Outcome(); });
}

cudaError_t cudaDeviceReset() {
  const int device = chosen_device();
  if (!machine().has(device)) return finish(__func__, machine().check(device));
  machine().reset(device);
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  return on_device(__func__, [](Machine& it, int device) {
    it.streams().synchronize(device);
    return it.faults().of(device);
  });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* prop, int device) {
  return about(__func__, device, [&](Machine& it) -> Outcome {
    if (prop == nullptr) return missing("prop");
    describe_device(it, device, *prop);
    return {};
  });
}

cudaError_t cudaDeviceGetAttribute(int* value, int attribute, int device) {
  return about(__func__, device, [&](Machine&) -> Outcome {
    if (value == nullptr) return missing("value");
    *value = device_attribute(device, attribute);
    return {};
  });
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
  return about(__func__, device, [&](Machine&) -> Outcome {
    const std::string text = pci_bus_id(device);
    if (id == nullptr || length <= static_cast<int>(text.size())) {
      return invalid("there are " + std::to_string(length) + " bytes for '" + text +
                     "'");
    }
    std::memcpy(id, text.c_str(), text.size() + 1);
    return {};
  });
}

cudaError_t cudaDeviceGetByPCIBusId(int* device, const char* id) {
  if (device == nullptr || id == nullptr)
    return finish(__func__, missing("an argument"));
  const int found = device_of_bus_id(id);
  if (found < 0) {
    return finish(__func__,
                  {cudaErrorInvalidDevice, std::string("no device is ") + id});
  }
  *device = found;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  return about(__func__, device, [&](Machine& it) -> Outcome {
    if (Outcome usable = it.check(peer); !usable.ok()) return usable;
    if (can == nullptr) return missing("canAccessPeer");
    *can = device == peer ? 0 : 1;
    return {};
  });
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  return on_device(__func__, [&](Machine& it, int device) -> Outcome {
    if (Outcome usable = it.check(peer); !usable.ok()) return usable;
    if (device == peer) {
      return {cudaErrorInvalidDevice,
              "device " + std::to_string(peer) + " is no peer of itself"};
    }
    if (it.set_access(device, peer, true)) return {};
    return {cudaErrorPeerAccessAlreadyEnabled, ""};
  });
}

cudaError_t cudaDeviceDisablePeerAccess(int peer) {
  return on_device(__func__, [&](Machine& it, int device) -> Outcome {
    if (Outcome usable = it.check(peer); !usable.ok()) return usable;
    if (it.set_access(device, peer, false)) return {};
    return {cudaErrorPeerAccessNotEnabled, ""};
  });
}

cudaError_t cudaDeviceGetP2PAttribute(int* value, int attribute, int device, int peer) {
  return about(__func__, device, [&](Machine& it) -> Outcome {
    if (Outcome usable = it.check(peer); !usable.ok()) return usable;
    if (value == nullptr || device == peer) return invalid("there are no two devices");
    constexpr int kAccessSupported = 2;
    *value = attribute == kAccessSupported ? 1 : 0;
    return {};
  });
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return on_device(__func__, [&](Machine&, int) -> Outcome {
    constexpr int kGreatest = -5;
    if (least != nullptr) *least = 0;
    if (greatest != nullptr) *greatest = kGreatest;
    return {};
  });
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  if (version == nullptr) return finish(__func__, missing("version"));
  *version = kCudaVersion;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  if (version == nullptr) return finish(__func__, missing("version"));
  *version = kCudaVersion;
  return cudaSuccess;
}

cudaError_t cudaSetDeviceFlags(unsigned flags) {
  settings().flags = flags;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceFlags(unsigned* flags) {
  if (flags == nullptr) return finish(__func__, missing("flags"));
  *flags = settings().flags;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetLimit(std::size_t* value, unsigned limit) {
  return on_device(__func__, [&](Machine&, int) -> Outcome {
    if (value == nullptr || limit >= 8) return invalid("no such limit");
    *value = settings().limits[limit];
    return {};
  });
}

cudaError_t cudaDeviceSetLimit(unsigned limit, std::size_t value) {
  return on_device(__func__, [&](Machine&, int) -> Outcome {
    if (limit >= 8) return invalid("there is no limit " + std::to_string(limit));
    settings().limits[limit] = value;
    return {};
  });
}

cudaError_t cudaDeviceGetCacheConfig(int* config) {
  if (config != nullptr) *config = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceSetCacheConfig(int) { return cudaSuccess; }
cudaError_t cudaCtxResetPersistingL2Cache() { return cudaSuccess; }
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

// A fault of a device is given every time, and not forgotten.
static cudaError_t last_of(cudaError_t failure) {
  if (failure != cudaSuccess) return failure;
  return finish("a call before", machine().faults().of(chosen_device()));
}

cudaError_t cudaGetLastError() {
  const cudaError_t last = last_of(take_error());
  (void)take_error();
  return last;
}

cudaError_t cudaPeekAtLastError() { return last_of(last_error()); }
const char* cudaGetErrorName(cudaError_t error) { return error_name(error); }
const char* cudaGetErrorString(cudaError_t error) { return error_string(error); }

}  // extern "C"
#pragma GCC visibility pop
