// NVML, the management library: which GPUs there are, under which names.
//
// torch asks it before it starts CUDA, and for expandable segments. It knows all GPUs
// of the machine, whatever CUDA_VISIBLE_DEVICES hides, and starts nothing: a process
// may call it and fork. A device is a pointer to its number.
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "emulator/device_traits.h"

namespace weightsync::emulator {
namespace {

enum Result : unsigned {
  kSuccess = 0,
  kInvalidArgument = 2,
  kNotSupported = 3,
  kNotFound = 6,
  kInsufficientSize = 7,
};

// What all versions of nvmlGpuFabricInfoV_t begin with.
struct FabricInfo {
  unsigned version;
  unsigned char cluster[16];
  unsigned status;
  unsigned clique;
  unsigned char state;
};

constexpr int kMostDevices = 64;

const std::array<int, kMostDevices>& numbers() {
  static const std::array<int, kMostDevices> made = [] {
    std::array<int, kMostDevices> filled{};
    for (int each = 0; each < kMostDevices; ++each) filled.at(each) = each;
    return filled;
  }();
  return made;
}

// The number of the device behind a handle, or -1.
int number_of(const void* device) {
  for (const int& each : numbers()) {
    if (&each == device && each < physical_device_count()) return each;
  }
  return -1;
}

Result give(int number, const void** device) {
  if (device == nullptr) return kInvalidArgument;
  if (number < 0 || number >= physical_device_count()) return kNotFound;
  *device = &numbers().at(static_cast<std::size_t>(number));
  return kSuccess;
}

Result give(const std::string& text, char* result, unsigned length) {
  if (result == nullptr) return kInvalidArgument;
  if (text.size() >= length) return kInsufficientSize;
  std::memcpy(result, text.c_str(), text.size() + 1);
  return kSuccess;
}

// "GPU-77656967-6874-7379-6e63-000000000000".
std::string uuid_text(int number) {
  std::string text = "GPU-";
  const auto uuid = physical_device_uuid(number);
  for (std::size_t each = 0; each < uuid.size(); ++each) {
    if (each == 4 || each == 6 || each == 8 || each == 10) text += '-';
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x",
                  static_cast<unsigned char>(uuid.at(each)));
    text += digits;
  }
  return text;
}

// The number at the beginning of a text, and what follows it; -1 if there is none.
long number_in_front(const char*& text) {
  char* end = nullptr;
  const long number = std::strtol(text, &end, 16);
  const bool found = end != text;
  text = end;
  return found ? number : -1;
}

// Of "0000:01:00.0", whatever the length of the domain; -1 for anything else.
int bus_of(const char* id) {
  if (id == nullptr || number_in_front(id) != 0 || *id != ':') return -1;
  ++id;
  const long bus = number_in_front(id);
  return std::strcmp(id, ":00.0") == 0 ? static_cast<int>(bus) : -1;
}

}  // namespace
}  // namespace weightsync::emulator

using namespace weightsync::emulator;  // NOLINT: this file is the edge

#pragma GCC visibility push(default)
extern "C" {

unsigned nvmlInit_v2() { return kSuccess; }
unsigned nvmlInit() { return kSuccess; }
unsigned nvmlInitWithFlags(unsigned) { return kSuccess; }
unsigned nvmlShutdown() { return kSuccess; }

const char* nvmlErrorString(unsigned result) {
  switch (result) {
    case kSuccess:
      return "Success";
    case kInvalidArgument:
      return "Invalid Argument";
    case kNotSupported:
      return "Not Supported by the weightsync emulator";
    case kNotFound:
      return "Not Found";
    case kInsufficientSize:
      return "Insufficient Size";
    default:
      return "Unknown Error";
  }
}

unsigned nvmlSystemGetCudaDriverVersion_v2(int* version) {
  if (version == nullptr) return kInvalidArgument;
  *version = kCudaVersion;
  return kSuccess;
}

unsigned nvmlDeviceGetCount_v2(unsigned* count) {
  if (count == nullptr) return kInvalidArgument;
  *count = static_cast<unsigned>(physical_device_count());
  return kSuccess;
}

unsigned nvmlDeviceGetHandleByIndex_v2(unsigned index, const void** device) {
  return give(static_cast<int>(index), device);
}

unsigned nvmlDeviceGetHandleByPciBusId_v2(const char* id, const void** device) {
  const int bus = bus_of(id);
  for (int each = 0; each < physical_device_count(); ++each) {
    if (physical_device_bus(each) == bus) return give(each, device);
  }
  return kNotFound;
}

unsigned nvmlDeviceGetHandleByUUID(const char* uuid, const void** device) {
  if (uuid == nullptr) return kInvalidArgument;
  for (int each = 0; each < physical_device_count(); ++each) {
    if (uuid_text(each) == uuid) return give(each, device);
  }
  return kNotFound;
}

unsigned nvmlDeviceGetIndex(const void* device, unsigned* index) {
  const int number = number_of(device);
  if (number < 0 || index == nullptr) return kInvalidArgument;
  *index = static_cast<unsigned>(number);
  return kSuccess;
}

unsigned nvmlDeviceGetName(const void* device, char* name, unsigned length) {
  return number_of(device) < 0 ? kInvalidArgument : give(kDeviceName, name, length);
}

unsigned nvmlDeviceGetUUID(const void* device, char* uuid, unsigned length) {
  const int number = number_of(device);
  return number < 0 ? kInvalidArgument : give(uuid_text(number), uuid, length);
}

// Any two can, for reading, writing and the rest.
unsigned nvmlDeviceGetP2PStatus(const void* device, const void* peer, int,
                                int* status) {
  if (number_of(device) < 0 || number_of(peer) < 0 || status == nullptr) {
    return kInvalidArgument;
  }
  *status = 0;
  return kSuccess;
}

unsigned nvmlDeviceGetComputeRunningProcesses(const void* device, unsigned* count,
                                              void*) {
  if (number_of(device) < 0 || count == nullptr) return kInvalidArgument;
  *count = 0;
  return kSuccess;
}

unsigned nvmlDeviceGetNvLinkRemoteDeviceType(const void*, unsigned, int*) {
  return kNotSupported;
}

unsigned nvmlDeviceGetNvLinkRemotePciInfo_v2(const void*, unsigned, void*) {
  return kNotSupported;
}

// There is no fabric: state 0.
unsigned nvmlDeviceGetGpuFabricInfoV(const void* device, FabricInfo* info) {
  if (number_of(device) < 0 || info == nullptr) return kInvalidArgument;
  FabricInfo told{};
  told.version = info->version;
  *info = told;
  return kSuccess;
}

}  // extern "C"
#pragma GCC visibility pop
