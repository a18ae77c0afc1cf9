// Configuration: what the environment says about the machine that is emulated.
#pragma once

#include <cstddef>
#include <vector>

namespace weightsync::emulator {

struct Configuration {
  // By device: its number on the machine. CUDA_VISIBLE_DEVICES may hide or reorder.
  std::vector<int> devices;
  std::size_t memory = 0;  // bytes of each device
};

inline constexpr int kDefaultDevices = 8;
inline constexpr int kMostDevices = 64;
inline constexpr std::size_t kDefaultMemory = std::size_t{16} << 30;

// WEIGHTSYNC_EMULATOR_GPUS and WEIGHTSYNC_EMULATOR_MEMORY as given, or null. What is no
// number is said on stderr and taken as the default.
Configuration read_configuration(const char* devices, const char* memory,
                                 const char* visible);

// The same of this process's environment.
Configuration read_configuration();

}  // namespace weightsync::emulator
