#include "vmm.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>
#include <vector>

#include "outcome.h"

namespace weightsync::emulator {
namespace {

using shm::Code;
using shm::MutexLock;
using shm::Populate;
using shm::Result;
using shm::Segment;
using shm::Status;

Status refuse(std::string reason) { return {Code::kInvalid, std::move(reason)}; }

bool is_granular(std::uint64_t number) { return number % kVmmGranularity == 0; }

std::string range(const void* address, std::size_t nbytes) {
  return std::to_string(nbytes) + " bytes at " + show(address);
}

void* pointer(std::uintptr_t address) {
  return reinterpret_cast<void*>(address);  // NOLINT: an address it is
}

// Takes an address range without memory; false where there is none.
bool blank(void* address, std::size_t nbytes) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  return ::mmap(address, nbytes, PROT_NONE, kFlags, -1, 0) != MAP_FAILED;
}

int duplicate(int fd) { return ::fcntl(fd, F_DUPFD_CLOEXEC, 0); }

}  // namespace

Vmm::Physical::~Physical() {
  ::close(fd);
  if (counted) memory.give_back(traits.device, traits.nbytes);
}

Result<void*> Vmm::reserve(std::size_t nbytes, std::size_t alignment) {
  if (nbytes == 0 || !is_granular(nbytes) || !is_granular(alignment)) {
    return refuse("an address range and its alignment are multiples of " +
                  std::to_string(kVmmGranularity) + " bytes; found " +
                  std::to_string(nbytes) + " and " + std::to_string(alignment));
  }
  const std::size_t aligned = std::max(alignment, kVmmGranularity);
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* const start = ::mmap(nullptr, nbytes + aligned, PROT_NONE, kFlags, -1, 0);
  if (start == MAP_FAILED) {
    return shm::system_error("reserve " + std::to_string(nbytes) + " addresses", errno);
  }
  const auto first = reinterpret_cast<Address>(start);
  const Address base = (first + aligned - 1) / aligned * aligned;
  if (base > first) ::munmap(start, base - first);
  const Address end = first + nbytes + aligned;
  if (end > base + nbytes) ::munmap(pointer(base + nbytes), end - base - nbytes);
  const MutexLock lock(mu_);
  ranges_.emplace(base, nbytes);
  return pointer(base);
}

Status Vmm::free_range(void* base, std::size_t nbytes) {
  const MutexLock lock(mu_);
  const auto address = reinterpret_cast<Address>(base);
  const auto found = ranges_.find(address);
  if (found == ranges_.end() || found->second != nbytes) {
    return refuse(range(base, nbytes) + " were not reserved as one range");
  }
  const auto mapped = mappings_.lower_bound(address);
  if (mapped != mappings_.end() && mapped->first < address + nbytes) {
    return refuse(range(base, nbytes) + " still have memory mapped to them");
  }
  ranges_.erase(found);
  ::munmap(base, nbytes);
  return {};
}

VmmHandle Vmm::add(std::shared_ptr<Physical> physical) {
  const MutexLock lock(mu_);
  const VmmHandle handle = next_++;
  handles_[handle].physical = std::move(physical);
  return handle;
}

Result<VmmHandle> Vmm::create(const VmmTraits& traits) {
  if (traits.nbytes == 0 || !is_granular(traits.nbytes)) {
    return refuse("memory is created in multiples of " +
                  std::to_string(kVmmGranularity) + " bytes; found " +
                  std::to_string(traits.nbytes));
  }
  if (Status taken = memory_.take(traits.device, traits.nbytes); !taken.ok()) {
    return taken;
  }
  Result<std::shared_ptr<Segment>> made = Segment::create(traits.nbytes, Populate::kNo);
  const int fd =
      made.ok() ? duplicate(static_cast<int>(made.value()->locator().fd)) : -1;
  if (fd < 0) {
    memory_.give_back(traits.device, traits.nbytes);
    return made.ok() ? shm::system_error("duplicate a descriptor", errno)
                     : made.status();
  }
  return add(std::make_shared<Physical>(memory_, traits, made.take(), fd, true));
}

Result<VmmHandle> Vmm::retain(const void* address) {
  const MutexLock lock(mu_);
  const auto number = reinterpret_cast<Address>(address);
  auto next = mappings_.upper_bound(number);
  const bool found = next != mappings_.begin() &&
                     number - std::prev(next)->first < std::prev(next)->second.nbytes;
  if (!found) return refuse(show(address) + " is not mapped by cuMemMap");
  const std::shared_ptr<Physical>& physical = std::prev(next)->second.physical;
  for (auto& [handle, known] : handles_) {
    if (known.physical == physical) {
      known.references += 1;
      return handle;
    }
  }
  const VmmHandle handle = next_++;
  handles_[handle].physical = physical;
  return handle;
}

Status Vmm::release(VmmHandle handle) {
  std::shared_ptr<Physical> last;  // given back without the lock
  const MutexLock lock(mu_);
  const auto found = handles_.find(handle);
  if (found == handles_.end()) {
    return refuse(std::to_string(handle) + " is no handle of memory");
  }
  found->second.references -= 1;
  if (found->second.references > 0) return {};
  last = std::move(found->second.physical);
  handles_.erase(found);
  return {};
}

std::optional<VmmTraits> Vmm::traits(VmmHandle handle) {
  const MutexLock lock(mu_);
  const auto found = handles_.find(handle);
  if (found == handles_.end()) return std::nullopt;
  return found->second.physical->traits;
}

bool Vmm::is_reserved(Address address, std::size_t nbytes) {
  const auto next = ranges_.upper_bound(address);
  if (next == ranges_.begin()) return false;
  const auto [base, length] = *std::prev(next);
  return address - base < length && nbytes <= length - (address - base);
}

Status Vmm::check_map(Address address, std::size_t nbytes, std::size_t offset,
                      const Physical& physical) {
  const std::string what = range(pointer(address), nbytes);
  if (nbytes == 0 || !is_granular(nbytes) || !is_granular(address)) {
    return refuse(what + " are not made of " + std::to_string(kVmmGranularity) +
                  " byte pieces");
  }
  const std::size_t whole = physical.traits.nbytes;
  if (offset != 0 || nbytes > whole) {
    return refuse(what + " at offset " + std::to_string(offset) +
                  " do not fit memory of " + std::to_string(whole) +
                  " bytes; the offset must be 0");
  }
  if (!is_reserved(address, nbytes)) {
    return refuse(what + " do not lie in a reserved address range");
  }
  const auto after = mappings_.lower_bound(address + nbytes);
  const bool taken =
      after != mappings_.begin() &&
      std::prev(after)->first + std::prev(after)->second.nbytes > address;
  if (taken) return refuse(what + " have memory mapped to them already");
  return {};
}

Status Vmm::map(void* address, std::size_t nbytes, std::size_t offset,
                VmmHandle handle) {
  const MutexLock lock(mu_);
  const auto number = reinterpret_cast<Address>(address);
  const auto found = handles_.find(handle);
  if (found == handles_.end()) {
    return refuse(std::to_string(handle) + " is no handle of memory");
  }
  const std::shared_ptr<Physical>& physical = found->second.physical;
  if (Status fits = check_map(number, nbytes, offset, *physical); !fits.ok())
    return fits;
  if (::mmap(address, nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, physical->fd, 0) ==
      MAP_FAILED) {
    return shm::system_error("map " + range(address, nbytes), errno);
  }
  Allocation mapped;
  mapped.device = physical->traits.device;
  mapped.kind = Kind::kVmm;
  mapped.base = static_cast<std::byte*>(address);
  mapped.nbytes = nbytes;
  mapped.segment = physical->segment;
  if (Status added = memory_.add(std::move(mapped)); !added.ok()) return added;
  mappings_[number] = {physical, nbytes};
  return {};
}

bool Vmm::is_covered(Address address, std::size_t nbytes) {
  const Address end = address + nbytes;
  while (address < end) {
    const auto found = mappings_.find(address);
    if (found == mappings_.end()) return false;
    address += found->second.nbytes;
  }
  return address == end;
}

Status Vmm::unmap(void* address, std::size_t nbytes) {
  std::vector<std::shared_ptr<Physical>> last;  // given back without the lock
  const MutexLock lock(mu_);
  const auto first = reinterpret_cast<Address>(address);
  if (nbytes == 0 || !is_covered(first, nbytes)) {
    return refuse(range(address, nbytes) + " are not one or several whole mappings");
  }
  if (!blank(address, nbytes)) {
    return shm::system_error("unmap " + range(address, nbytes), errno);
  }
  for (Address at = first; at < first + nbytes;) {
    const auto found = mappings_.find(at);
    (void)memory_.remove(pointer(at));
    at += found->second.nbytes;
    last.push_back(std::move(found->second.physical));
    mappings_.erase(found);
  }
  return {};
}

Status Vmm::set_access(void* address, std::size_t nbytes, VmmAccess access) {
  const MutexLock lock(mu_);
  if (nbytes == 0 || !is_covered(reinterpret_cast<Address>(address), nbytes)) {
    return refuse(range(address, nbytes) + " are not one or several whole mappings");
  }
  const int write = access == VmmAccess::kReadWrite ? PROT_WRITE : PROT_NONE;
  const int read = access == VmmAccess::kNone ? PROT_NONE : PROT_READ;
  if (::mprotect(address, nbytes, read | write) != 0) {
    return shm::system_error("protect " + range(address, nbytes), errno);
  }
  return {};
}

Result<int> Vmm::export_fd(VmmHandle handle) {
  const MutexLock lock(mu_);
  const auto found = handles_.find(handle);
  if (found == handles_.end()) {
    return refuse(std::to_string(handle) + " is no handle of memory");
  }
  const int fd = duplicate(found->second.physical->fd);
  if (fd < 0) return shm::system_error("duplicate a descriptor", errno);
  return fd;
}

Result<VmmHandle> Vmm::import_fd(int device, int fd) {
  struct stat info{};
  if (::fstat(fd, &info) != 0) {
    return shm::system_error("inspect descriptor " + std::to_string(fd), errno);
  }
  VmmTraits traits;
  traits.device = device;
  traits.nbytes = static_cast<std::size_t>(info.st_size);
  if (traits.nbytes == 0 || !is_granular(traits.nbytes)) {
    return refuse("descriptor " + std::to_string(fd) + " is no memory of a device");
  }
  auto opened =
      Segment::open({::getpid(), fd, info.st_ino, traits.nbytes}, Populate::kNo);
  if (!opened.ok()) return opened.status();
  const int own = duplicate(fd);
  if (own < 0) return shm::system_error("duplicate a descriptor", errno);
  return add(std::make_shared<Physical>(memory_, traits, opened.take(), own, false));
}

}  // namespace weightsync::emulator
