#include "emulator/nccl/shared_segments.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <map>
#include <mutex>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace weightsync::emulator::nccl {
namespace {

using SegmentPtr = std::shared_ptr<shm::Segment>;

// The segments of this process that others may open, by inode. Never destroyed:
// streams may still run when the process ends.
struct Created {
  std::mutex mutex;
  std::map<std::uint64_t, std::weak_ptr<shm::Segment>> by_inode;
};

Created& created() {
  static Created* const instance = new Created;
  return *instance;
}

}  // namespace

shm::Result<SegmentPtr> create_shared(std::size_t nbytes) {
  shm::Result<SegmentPtr> segment = shm::Segment::create(nbytes, shm::Populate::kNo);
  if (!segment.ok()) return segment;
  Created& all = created();
  const std::lock_guard lock(all.mutex);
  for (auto entry = all.by_inode.begin(); entry != all.by_inode.end();) {
    entry = entry->second.expired() ? all.by_inode.erase(entry) : std::next(entry);
  }
  all.by_inode[segment.value()->locator().inode] = segment.value();
  return segment;
}

shm::Result<SegmentPtr> open_shared(const shm::Locator& locator) {
  if (locator.pid == ::getpid()) {
    Created& all = created();
    const std::lock_guard lock(all.mutex);
    const auto found = all.by_inode.find(locator.inode);
    SegmentPtr segment = found == all.by_inode.end() ? nullptr : found->second.lock();
    if (segment) return segment;
    return shm::Status(shm::Code::kPeer,
                       "the memory of a rank of this process is gone");
  }
  return shm::Segment::open(locator, shm::Populate::kNo);
}

bool is_process_gone(std::int64_t pid) {
  if (pid == ::getpid()) return false;
  const int pidfd = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
  if (pidfd < 0) return errno == ESRCH;
  pollfd polled{pidfd, POLLIN, 0};
  const bool ended = ::poll(&polled, 1, 0) > 0;
  ::close(pidfd);
  return ended;
}

}  // namespace weightsync::emulator::nccl
