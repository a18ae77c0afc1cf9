// Memory: every allocation that CUDA knows in this process, by address, and what each
// device holds. Thread-safe; it owns the segments, and the mappings that Vmm does not.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "emulator/core.h"
#include "shm/annotations.h"

namespace weightsync::emulator {

std::string kind_name(Kind kind);

// "512 bytes of device 1 at 0x7f.. (cudaMalloc)".
std::string describe(const Allocation& allocation);

class Memory {
 public:
  Memory(int devices, std::size_t memory) : total_(memory), use_(devices) {}

  std::optional<Allocation> find(const void* address);
  shm::Status check_range(const void* address, std::size_t nbytes);

  // Allocates, counts and registers.
  shm::Result<Allocation> allocate(int device, Kind kind, std::size_t nbytes);
  // Registers memory that somebody else holds. kInvalid: it overlaps what is known.
  shm::Status add(Allocation allocation);
  // Unregisters what starts at `base`; nothing does: empty.
  std::optional<Allocation> remove(const void* base);
  // Unregisters and uncounts what allocate() gave.
  shm::Status release(const void* base);

  // Counts memory of a device that has no address yet. kSystem: there is not so much.
  shm::Status take(int device, std::size_t nbytes);
  void give_back(int device, std::size_t nbytes);

  void set_filter(AllocationFilter filter);
  MemoryUse use(int device);
  // Starts of what a device holds, for cudaDeviceReset.
  std::vector<Allocation> of_device(int device);

 private:
  // By the address of the first byte.
  using ByAddress = std::map<std::uintptr_t, Allocation>;

  const Allocation* find_locked(std::uintptr_t address) WEIGHTSYNC_REQUIRES(mu_);
  bool overlaps(const Allocation& allocation) WEIGHTSYNC_REQUIRES(mu_);

  // Constant after construction.
  const std::size_t total_;

  shm::Mutex mu_;
  ByAddress allocations_ WEIGHTSYNC_GUARDED_BY(mu_);
  std::vector<MemoryUse> use_ WEIGHTSYNC_GUARDED_BY(mu_);
  AllocationFilter filter_ WEIGHTSYNC_GUARDED_BY(mu_);
  std::uint64_t next_id_ WEIGHTSYNC_GUARDED_BY(mu_) = 1;
};

}  // namespace weightsync::emulator
