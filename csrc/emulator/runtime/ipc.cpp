#include "ipc.h"

#include <utility>

namespace weightsync::emulator {

using shm::MutexLock;

Outcome Ipc::open(Memory& memory, const IpcHandle& handle, int device, void** address) {
  const MutexLock lock(mu_);
  Opened& opened = by_inode_[handle.locator.inode];
  if (opened.count > 0) {
    opened.count += 1;
    *address = opened.address;
    return {};
  }
  auto segment = shm::Segment::open(handle.locator, shm::Populate::kNo);
  if (!segment.ok()) {
    by_inode_.erase(handle.locator.inode);
    return {cudaErrorInvalidResourceHandle, segment.status().message()};
  }
  Allocation mapped;
  mapped.device = device;
  mapped.kind = Kind::kIpc;
  mapped.segment = segment.take();
  mapped.base = mapped.segment->data();
  mapped.nbytes = handle.nbytes;
  opened = {mapped.base, 1};
  *address = mapped.base;
  return outcome_of(memory.add(std::move(mapped)));
}

Outcome Ipc::close(Memory& memory, void* address) {
  const MutexLock lock(mu_);
  for (auto it = by_inode_.begin(); it != by_inode_.end(); ++it) {
    if (it->second.address != address) continue;
    it->second.count -= 1;
    if (it->second.count > 0) return {};
    by_inode_.erase(it);
    memory.remove(address);
    return {};
  }
  return invalid(show(address) + " was not opened, or is closed");
}

}  // namespace weightsync::emulator
