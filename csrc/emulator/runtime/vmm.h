// Vmm: the virtual memory management of CUDA: address ranges, memory without an address
// (handles), and the mappings of the one into the other. Thread-safe.
//
// A handle is a segment, counted as memory of its device as long as the handle, or a
// mapping of it, exists. A mapping is registered with Memory, and may be read and
// written once access was granted.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>

#include "emulator/vmm.h"
#include "memory.h"
#include "shm/annotations.h"

namespace weightsync::emulator {

class Vmm {
 public:
  explicit Vmm(Memory& memory) : memory_(memory) {}

  shm::Result<void*> reserve(std::size_t nbytes, std::size_t alignment);
  shm::Status free_range(void* base, std::size_t nbytes);

  shm::Result<VmmHandle> create(const VmmTraits& traits);
  shm::Result<VmmHandle> retain(const void* address);
  shm::Status release(VmmHandle handle);
  std::optional<VmmTraits> traits(VmmHandle handle);

  shm::Status map(void* address, std::size_t nbytes, std::size_t offset,
                  VmmHandle handle);
  shm::Status unmap(void* address, std::size_t nbytes);
  shm::Status set_access(void* address, std::size_t nbytes, VmmAccess access);

  shm::Result<int> export_fd(VmmHandle handle);
  shm::Result<VmmHandle> import_fd(int device, int fd);

 private:
  // Physical memory; whoever holds it last gives it back.
  struct Physical {
    Physical(Memory& its_memory, VmmTraits its_traits,
             std::shared_ptr<shm::Segment> its_segment, int its_fd, bool is_counted)
        : memory(its_memory),
          traits(its_traits),
          segment(std::move(its_segment)),
          fd(its_fd),
          counted(is_counted) {}
    ~Physical();
    Physical(const Physical&) = delete;
    Physical& operator=(const Physical&) = delete;

    Memory& memory;
    const VmmTraits traits;
    const std::shared_ptr<shm::Segment> segment;
    const int fd;  // of its own
    const bool counted;
  };
  struct Handle {
    std::shared_ptr<Physical> physical;
    int references = 1;
  };
  struct Mapping {
    std::shared_ptr<Physical> physical;
    std::size_t nbytes = 0;
  };
  using Address = std::uintptr_t;

  VmmHandle add(std::shared_ptr<Physical> physical);
  shm::Status check_map(Address address, std::size_t nbytes, std::size_t offset,
                        const Physical& physical) WEIGHTSYNC_REQUIRES(mu_);
  bool is_reserved(Address address, std::size_t nbytes) WEIGHTSYNC_REQUIRES(mu_);
  // Whether mappings cover exactly this range.
  bool is_covered(Address address, std::size_t nbytes) WEIGHTSYNC_REQUIRES(mu_);

  // Constant after construction.
  Memory& memory_;

  shm::Mutex mu_;
  std::map<Address, std::size_t> ranges_ WEIGHTSYNC_GUARDED_BY(mu_);
  std::map<VmmHandle, Handle> handles_ WEIGHTSYNC_GUARDED_BY(mu_);
  std::map<Address, Mapping> mappings_ WEIGHTSYNC_GUARDED_BY(mu_);
  VmmHandle next_ WEIGHTSYNC_GUARDED_BY(mu_) = 1;
};

}  // namespace weightsync::emulator
