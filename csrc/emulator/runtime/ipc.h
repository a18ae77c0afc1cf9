// Ipc: the memory of other processes that this one has opened. Thread-safe.
#pragma once

#include <cstdint>
#include <map>

#include "cuda/abi.h"
#include "memory.h"
#include "outcome.h"
#include "shm/annotations.h"

namespace weightsync::emulator {

// What the 64 bytes of a handle hold.
struct IpcHandle {
  std::uint64_t magic = 0;  // of memory or of an event
  shm::Locator locator;
  std::uint64_t nbytes = 0;          // as asked for; the segment may be larger
  std::int32_t physical_device = 0;  // on which it is
  std::int32_t reserved = 0;
};
static_assert(sizeof(IpcHandle) <= sizeof(cudaIpcMemHandle_t));

inline constexpr std::uint64_t kIpcMemory = 0x77735f656d5f6d65;
inline constexpr std::uint64_t kIpcEvent = 0x77735f656d5f6576;

class Ipc {
 public:
  // Opened again, the same memory has the same address until it is closed as often.
  Outcome open(Memory& memory, const IpcHandle& handle, int device, void** address);
  Outcome close(Memory& memory, void* address);

 private:
  struct Opened {
    void* address = nullptr;
    int count = 0;
  };

  shm::Mutex mu_;
  std::map<std::uint64_t, Opened> by_inode_ WEIGHTSYNC_GUARDED_BY(mu_);
};

}  // namespace weightsync::emulator
