// One fault of each kind that the sanitizers look for: what tests/sanitized commits to
// see that it is reported. Built with the sanitizers only, and called by nobody else.

#include <cstddef>
#include <cstdint>

#define WEIGHTSYNC_FAULT extern "C" __attribute__((visibility("default")))

// Reads the byte behind an allocation of `size`.
WEIGHTSYNC_FAULT int weightsync_overrun(int size) {
  const auto* memory = new volatile char[static_cast<std::size_t>(size)]();
  const int found = memory[size];
  delete[] memory;
  return found;
}

// Overflows unless `number` is negative.
WEIGHTSYNC_FAULT int weightsync_overflow(int number) { return number + 2147483647 + 1; }

// Leaves an allocation of `size` to nobody.
WEIGHTSYNC_FAULT void weightsync_leak(int size) {
  auto* memory = new volatile char[static_cast<std::size_t>(size)];
  memory[0] = 1;
}

// Reads where nothing is.
WEIGHTSYNC_FAULT int weightsync_stray(int address) {
  // NOLINTNEXTLINE(performance-no-int-to-ptr): that is the fault
  return *reinterpret_cast<const volatile char*>(static_cast<std::uintptr_t>(address));
}
