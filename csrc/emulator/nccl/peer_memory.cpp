#include "emulator/nccl/peer_memory.h"

#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>

#include "emulator/core.h"
#include "emulator/nccl/operation.h"
#include "emulator/nccl/shared_segments.h"

namespace weightsync::emulator::nccl {
namespace {

constexpr std::chrono::milliseconds kTrimEvery{100};

bool is_stale(const shm::Locator& locator) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%lld/fd/%lld",
                static_cast<long long>(locator.pid),
                static_cast<long long>(locator.fd));
  struct stat info{};
  return ::stat(path, &info) != 0 || info.st_ino != locator.inode;
}

std::shared_ptr<std::byte> at(const std::shared_ptr<shm::Segment>& segment,
                              std::size_t offset) {
  return {segment, segment->data() + offset};
}

// Memory of this process that need not be mapped again, or null.
std::shared_ptr<std::byte> find_own(const Remote& remote) {
  // It was a pointer of this process. NOLINTNEXTLINE(performance-no-int-to-ptr)
  auto* const address = reinterpret_cast<std::byte*>(remote.address);
  if (remote.memory.fd < 0) return {std::shared_ptr<void>(), address};
  const std::optional<Allocation> found = find_allocation(address);
  if (!found || !found->segment) return nullptr;
  const bool same = found->segment->locator().inode == remote.memory.inode;
  return same ? at(found->segment, remote.offset) : nullptr;
}

}  // namespace

Remote locate(const void* address) {
  Remote remote;
  remote.address = reinterpret_cast<std::uint64_t>(address);
  const std::optional<Allocation> found = find_allocation(address);
  if (found && found->segment) {
    const std::size_t into = static_cast<const std::byte*>(address) - found->base;
    remote.memory = found->segment->locator();
    remote.offset = found->segment_offset + into;
    remote.nbytes = found->nbytes - into;
  }
  remote.memory.pid = ::getpid();
  return remote;
}

std::shared_ptr<std::byte> PeerMemory::map(const Remote& remote) {
  if (remote.memory.pid == ::getpid()) {
    if (auto own = find_own(remote)) return own;
  }
  if (remote.memory.fd < 0) return nullptr;
  const shm::MutexLock lock(mu_);
  const Key key{remote.memory.pid, remote.memory.inode};
  auto found = entries_.find(key);
  if (found == entries_.end()) {
    auto segment = shm::Segment::open(remote.memory, shm::Populate::kNo);
    if (!segment.ok()) return nullptr;
    found = entries_.emplace(key, Entry{remote.memory, segment.take()}).first;
  }
  return at(found->second.segment, remote.offset);
}

std::shared_ptr<shm::Segment> PeerMemory::open(const shm::Locator& locator) {
  auto segment = shm::Segment::open(locator, shm::Populate::kNo);
  return segment.ok() ? segment.take() : nullptr;
}

void PeerMemory::trim() {
  const shm::Deadline now = shm::Clock::now();
  const shm::MutexLock lock(mu_);
  if (entries_.empty() || now < next_trim_) return;
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    entry = is_stale(entry->second.locator) ? entries_.erase(entry) : std::next(entry);
  }
  next_trim_ = now + kTrimEvery;
}

}  // namespace weightsync::emulator::nccl
