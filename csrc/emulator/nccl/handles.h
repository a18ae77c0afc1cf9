// Handles: the numbers that stand for communicators and windows outside.
//
// Different in every process and never given out twice, so a handle that is used after
// its end is known as dead, where NCCL would read freed memory.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace weightsync::emulator::nccl {

template <class Handle>
Handle new_handle() {
  static std::atomic<std::uint64_t> last{0};
  const auto process = static_cast<std::uint64_t>(::getpid()) & 0xffffffU;
  const std::uint64_t number = (process << 24 | ++last) << 8;
  return reinterpret_cast<Handle>(number);  // NOLINT: it is the address of nothing
}

}  // namespace weightsync::emulator::nccl
