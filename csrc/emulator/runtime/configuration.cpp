#include "configuration.h"

#include <cerrno>
#include <cstdlib>
#include <optional>
#include <sstream>
#include <string>

#include "emulator/core.h"

namespace weightsync::emulator {
namespace {

std::optional<long long> parse(const std::string& text) {
  if (text.empty()) return std::nullopt;
  char* end = nullptr;
  errno = 0;
  const long long number = std::strtoll(text.c_str(), &end, 10);
  if (errno != 0 || *end != '\0') return std::nullopt;
  return number;
}

long long number_or(const char* name, const char* text, long long otherwise,
                    long long most) {
  if (text == nullptr) return otherwise;
  const std::optional<long long> number = parse(text);
  if (number && *number >= 0 && *number <= most) return *number;
  complain(std::string(name) + " is a number from 0 to " + std::to_string(most) +
           "; found '" + text + "', taking " + std::to_string(otherwise));
  return otherwise;
}

// As CUDA reads it: the list ends at the first entry that is no device.
std::vector<int> visible_devices(const std::string& list, int count) {
  std::vector<int> devices;
  std::istringstream entries(list);
  std::string entry;
  while (std::getline(entries, entry, ',')) {
    const std::optional<long long> number = parse(entry);
    if (!number || *number < 0 || *number >= count) break;
    devices.push_back(static_cast<int>(*number));
  }
  return devices;
}

}  // namespace

Configuration read_configuration(const char* devices, const char* memory,
                                 const char* visible) {
  constexpr long long kMostMemory = 1LL << 46;
  Configuration configuration;
  const auto count = static_cast<int>(
      number_or("WEIGHTSYNC_EMULATOR_GPUS", devices, kDefaultDevices, kMostDevices));
  configuration.memory = static_cast<std::size_t>(
      number_or("WEIGHTSYNC_EMULATOR_MEMORY", memory,
                static_cast<long long>(kDefaultMemory), kMostMemory));
  if (visible != nullptr) {
    configuration.devices = visible_devices(visible, count);
  } else {
    for (int device = 0; device < count; ++device) {
      configuration.devices.push_back(device);
    }
  }
  return configuration;
}

Configuration read_configuration() {
  return read_configuration(std::getenv("WEIGHTSYNC_EMULATOR_GPUS"),
                            std::getenv("WEIGHTSYNC_EMULATOR_MEMORY"),
                            std::getenv("CUDA_VISIBLE_DEVICES"));
}

}  // namespace weightsync::emulator
