// PeerMemory: the segments of other ranks that this rank has mapped.
//
// Allocations of the same process are not mapped again: they are used where their
// segment is, which for memory of ncclMemAlloc is another place than the user's.
// Mappings whose owner has freed the memory are dropped by trim(). Any thread may call
// anything.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "shm/annotations.h"
#include "shm/futex.h"
#include "shm/segment.h"

namespace weightsync::emulator::nccl {

struct Remote;

class PeerMemory {
 public:
  // The address of this memory here, or null if it cannot be had. Memory of a device
  // can be used as long as this is kept, also when its owner has left and freed it.
  std::shared_ptr<std::byte> map(const Remote& remote);
  // A mapping that the caller keeps for as long as it likes: for windows.
  std::shared_ptr<shm::Segment> open(const shm::Locator& locator);

  // Between operations: unmaps what its owner has freed, if it was not done lately.
  void trim();

 private:
  shm::Mutex mu_;
  using Key = std::pair<std::int64_t, std::uint64_t>;  // process, inode
  struct Entry {
    shm::Locator locator;
    std::shared_ptr<shm::Segment> segment;
  };
  std::map<Key, Entry> entries_ WEIGHTSYNC_GUARDED_BY(mu_);
  shm::Deadline next_trim_ WEIGHTSYNC_GUARDED_BY(mu_);
};

}  // namespace weightsync::emulator::nccl
