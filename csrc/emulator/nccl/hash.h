// Keys that ranks compute alike: of communicators and of the meetings of their hosts.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

namespace weightsync::emulator::nccl {

// What a key is for, so that keys of different kinds never meet.
inline constexpr std::uint64_t kExchangeKey = 1;
inline constexpr std::uint64_t kSplitKey = 2;
inline constexpr std::uint64_t kShrinkKey = 3;
inline constexpr std::uint64_t kGrowKey = 4;
inline constexpr std::uint64_t kConnectedKey = 5;

// Never 0.
inline std::uint64_t hash(const std::vector<std::uint64_t>& values) {
  std::uint64_t state = 0x9e3779b97f4a7c15;
  for (const std::uint64_t value : values) {
    state ^= value + 0x9e3779b97f4a7c15 + (state << 6) + (state >> 2);
    state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9;
    state = (state ^ (state >> 27)) * 0x94d049bb133111eb;
    state ^= state >> 31;
  }
  return state == 0 ? 1 : state;
}

inline std::uint64_t hash(std::initializer_list<std::uint64_t> values) {
  return hash(std::vector<std::uint64_t>(values));
}

}  // namespace weightsync::emulator::nccl
