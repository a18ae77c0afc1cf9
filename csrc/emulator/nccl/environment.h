// Variables of the environment, read at each use as NCCL's tests need it.
#pragma once

#include <cstdlib>
#include <optional>
#include <string>

namespace weightsync::emulator::nccl {

// Empty if not set.
inline std::string environment(const char* name) {
  const char* const value = std::getenv(name);  // NOLINT: only read
  return value == nullptr ? "" : value;
}

// Nothing if not set or no number.
inline std::optional<long long> environment_number(const char* name) {
  const std::string value = environment(name);
  char* end = nullptr;
  const long long number = std::strtoll(value.c_str(), &end, 0);
  if (value.empty() || *end != '\0') return std::nullopt;
  return number;
}

}  // namespace weightsync::emulator::nccl
