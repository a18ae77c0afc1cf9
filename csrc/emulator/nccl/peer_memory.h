// PeerMemory: the segments of other ranks that this rank has mapped.
//
// Memory of the same process is never mapped again: its address is used as it is, so
// that the thread sanitizer follows it. Mappings whose owner has freed the memory are
// dropped by trim(). Any thread may call anything.
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
  // The address of this memory here, or null if it cannot be had. Valid until the next
  // trim() at least.
  std::byte* map(const Remote& remote);
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
