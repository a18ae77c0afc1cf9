// What an emulated GPU says of itself, as the runtime library tells the driver library.
#pragma once

#include <array>
#include <string>

#include "emulator/core.h"

namespace weightsync::emulator {

inline constexpr const char* kDeviceName = "weightsync emulated GPU";

// Compute capability 9.0, and the version of CUDA that the libraries claim to be.
inline constexpr int kCapabilityMajor = 9;
inline constexpr int kCapabilityMinor = 0;
inline constexpr int kMultiprocessors = 132;
inline constexpr int kCudaVersion = 13000;

// The value of a cudaDeviceAttr, which has the same number as the CUdevice_attribute. 0
// for what an emulated GPU does not have or cannot do.
WEIGHTSYNC_EMULATOR_EXPORT int device_attribute(int device, int attribute);

// "0000:01:00.0"; differs by physical device.
WEIGHTSYNC_EMULATOR_EXPORT std::string pci_bus_id(int device);
// The device of such a text, or -1.
WEIGHTSYNC_EMULATOR_EXPORT int device_of_bus_id(const std::string& id);

WEIGHTSYNC_EMULATOR_EXPORT std::array<char, 16> device_uuid(int device);

// The GPUs of the emulated machine, hidden ones too, numbered as physical_device()
// does. These three read the environment alone: a process may call them and fork.
WEIGHTSYNC_EMULATOR_EXPORT int physical_device_count();
WEIGHTSYNC_EMULATOR_EXPORT std::array<char, 16> physical_device_uuid(int physical);
WEIGHTSYNC_EMULATOR_EXPORT int physical_device_bus(int physical);

}  // namespace weightsync::emulator
