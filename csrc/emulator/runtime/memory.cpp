#include "memory.h"

#include <algorithm>
#include <utility>

#include "outcome.h"

namespace weightsync::emulator {
namespace {

using shm::Code;
using shm::MutexLock;
using shm::Populate;
using shm::Result;
using shm::Segment;
using shm::Status;

std::uintptr_t number(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address);
}

std::uintptr_t end_of(const Allocation& allocation) {
  return number(allocation.base) + allocation.nbytes;
}

bool is_counted(Kind kind) { return kind == Kind::kMalloc || kind == Kind::kVmm; }

std::size_t rounded(Kind kind, std::size_t nbytes) {
  if (kind != Kind::kVmm) return nbytes;
  return (nbytes + kVmmGranularity - 1) / kVmmGranularity * kVmmGranularity;
}

}  // namespace

std::string kind_name(Kind kind) {
  switch (kind) {
    case Kind::kMalloc:
      return "cudaMalloc";
    case Kind::kVmm:
      return "virtual memory management";
    case Kind::kIpc:
      return "cudaIpcOpenMemHandle";
    case Kind::kHost:
      return "pinned host memory";
    case Kind::kHostRegistered:
      return "registered host memory";
    case Kind::kManaged:
      return "cudaMallocManaged";
  }
  return "unknown";
}

std::string describe(const Allocation& allocation) {
  return std::to_string(allocation.nbytes) + " bytes of device " +
         std::to_string(allocation.device) + " at " + show(allocation.base) + " (" +
         kind_name(allocation.kind) + ")";
}

const Allocation* Memory::find_locked(std::uintptr_t address) {
  auto next = allocations_.upper_bound(address);
  if (next == allocations_.begin()) return nullptr;
  const Allocation& before = std::prev(next)->second;
  return address < end_of(before) ? &before : nullptr;
}

std::optional<Allocation> Memory::find(const void* address) {
  const MutexLock lock(mu_);
  const Allocation* const found = find_locked(number(address));
  return found == nullptr ? std::nullopt : std::make_optional(*found);
}

Status Memory::check_range(const void* address, std::size_t nbytes) {
  const MutexLock lock(mu_);
  const std::uintptr_t first = number(address);
  const std::string what = std::to_string(nbytes) + " bytes at " + show(address);
  const Allocation* part = find_locked(first);
  if (part == nullptr) {
    return {Code::kInvalid, what + " are no memory that CUDA knows"};
  }
  const Allocation& start = *part;
  while (part != nullptr && nbytes > end_of(*part) - first) {
    const Allocation* const next = find_locked(end_of(*part));
    const bool continues = next != nullptr && next->kind == Kind::kVmm &&
                           start.kind == Kind::kVmm && next->device == start.device;
    part = continues ? next : nullptr;
  }
  if (part != nullptr) return {};
  return {Code::kInvalid, what + " leave their allocation, " + describe(start) +
                              ", at byte " +
                              std::to_string(first - number(start.base)) + " of it"};
}

Status Memory::take(int device, std::size_t nbytes) {
  AllocationFilter filter;
  std::size_t used = 0;
  {
    const MutexLock lock(mu_);
    filter = filter_;
    used = use_[device].used;
  }
  // Asked without the lock: it may look at the memory itself.
  const bool refused = filter && !filter(device, used, nbytes);
  const MutexLock lock(mu_);
  MemoryUse& use = use_[device];
  if (refused || nbytes > total_ - std::min(total_, use.used)) {
    return {Code::kSystem, "asked for " + std::to_string(nbytes) + " bytes of device " +
                               std::to_string(device) + ", which holds " +
                               std::to_string(use.used) + " of its " +
                               std::to_string(total_) + " bytes" +
                               (refused ? " (refused by a configured fault)" : "")};
  }
  use.used += nbytes;
  use.peak = std::max(use.peak, use.used);
  use.allocations += 1;
  return {};
}

void Memory::give_back(int device, std::size_t nbytes) {
  const MutexLock lock(mu_);
  use_[device].used -= nbytes;
  use_[device].allocations -= 1;
}

Result<Allocation> Memory::allocate(int device, Kind kind, std::size_t nbytes) {
  Allocation made;
  made.device = device;
  made.kind = kind;
  made.nbytes = rounded(kind, nbytes);
  if (is_counted(kind)) {
    if (Status taken = take(device, made.nbytes); !taken.ok()) return taken;
  }
  Result<std::shared_ptr<Segment>> segment =
      Segment::create(made.nbytes, Populate::kNo);
  if (!segment.ok()) {
    if (is_counted(kind)) give_back(device, made.nbytes);
    return segment.status();
  }
  made.segment = segment.take();
  made.base = made.segment->data();
  const MutexLock lock(mu_);
  made.id = next_id_++;
  allocations_.emplace(number(made.base), made);
  return made;
}

bool Memory::overlaps(const Allocation& allocation) {
  const std::uintptr_t first = number(allocation.base);
  if (find_locked(first) != nullptr) return true;
  const auto next = allocations_.lower_bound(first);
  return next != allocations_.end() && next->first < end_of(allocation);
}

Status Memory::add(Allocation allocation) {
  const MutexLock lock(mu_);
  if (overlaps(allocation)) {
    return {Code::kInvalid, describe(allocation) + " overlaps memory known to CUDA"};
  }
  allocation.id = next_id_++;
  const std::uintptr_t base = number(allocation.base);
  allocations_.emplace(base, std::move(allocation));
  return {};
}

std::optional<Allocation> Memory::remove(const void* base) {
  const MutexLock lock(mu_);
  const auto found = allocations_.find(number(base));
  if (found == allocations_.end()) return std::nullopt;
  Allocation removed = std::move(found->second);
  allocations_.erase(found);
  return removed;
}

Status Memory::release(const void* base) {
  const std::optional<Allocation> found = find(base);
  if (!found || found->base != base) {
    return {Code::kInvalid,
            show(base) +
                (found ? " lies inside " + describe(*found) : " is no allocation") +
                ": freed before, or never allocated"};
  }
  const bool owned = found->segment != nullptr && found->kind != Kind::kIpc &&
                     found->base == found->segment->data();
  if (!owned) {
    return {Code::kInvalid, describe(*found) + " is not freed by this function"};
  }
  if (remove(base) && is_counted(found->kind)) give_back(found->device, found->nbytes);
  return {};
}

void Memory::set_filter(AllocationFilter filter) {
  const MutexLock lock(mu_);
  filter_ = std::move(filter);
}

MemoryUse Memory::use(int device) {
  const MutexLock lock(mu_);
  MemoryUse use = use_[device];
  use.total = total_;
  return use;
}

std::vector<Allocation> Memory::of_device(int device) {
  const MutexLock lock(mu_);
  std::vector<Allocation> found;
  for (const auto& [base, allocation] : allocations_) {
    if (allocation.device == device) found.push_back(allocation);
  }
  return found;
}

}  // namespace weightsync::emulator
