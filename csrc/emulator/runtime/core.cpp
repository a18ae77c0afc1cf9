// The functions of core.h and vmm.h over the machine.
#include "emulator/core.h"

#include <unistd.h>

#include <cstdio>
#include <utility>

#include "emulator/vmm.h"
#include "machine.h"

namespace weightsync::emulator {
namespace {

shm::Status check_device(int device) {
  if (machine().has(device)) return {};
  return {shm::Code::kInvalid, "asked for device " + std::to_string(device) + " of " +
                                   std::to_string(machine().devices())};
}

}  // namespace

std::optional<Allocation> find_allocation(const void* address) {
  return machine().memory().find(address);
}

shm::Status check_range(const void* address, std::size_t nbytes) {
  return machine().memory().check_range(address, nbytes);
}

shm::Result<Allocation> allocate(int device, Kind kind, std::size_t nbytes) {
  if (shm::Status known = check_device(device); !known.ok()) return known;
  if (kind == Kind::kIpc || kind == Kind::kHostRegistered || nbytes == 0) {
    return shm::Status(
        shm::Code::kInvalid,
        "asked to allocate " + std::to_string(nbytes) + " bytes of " + kind_name(kind));
  }
  if (kind == Kind::kVmm) return machine().allocate_vmm(device, nbytes);
  return machine().memory().allocate(device, kind, nbytes);
}

shm::Status release(void* base) {
  if (machine().release_vmm(base)) return {};
  return machine().memory().release(base);
}

void set_allocation_filter(AllocationFilter filter) {
  machine().memory().set_filter(std::move(filter));
}

MemoryUse memory_use(int device) {
  if (!machine().has(device)) return {};
  return machine().memory().use(device);
}

std::shared_ptr<Stream> stream_of(CUstream_st* handle) {
  if (!machine().has(chosen_device())) return nullptr;
  return machine().streams().find(handle, chosen_device());
}

Stream* current_stream() { return running_stream(); }

void set_operation_note(std::string what, const std::string& call_site) {
  if (QueuedStream* const stream = running_stream()) {
    stream->set_note(std::move(what), call_site);
  }
}

std::vector<StreamReport> busy_streams() { return machine().streams().reports(); }

int device_count() { return machine().devices(); }

int current_device() { return chosen_device(); }

shm::Status set_current_device(int device) {
  const Outcome chosen = choose_device(device);
  if (chosen.ok()) return {};
  return {shm::Code::kInvalid, chosen.reason()};
}

int physical_device(int device) {
  return machine().has(device) ? machine().physical(device) : -1;
}

void poison(int device, int cuda_error, std::string message) {
  complain("device " + std::to_string(device) + " failed: " + message);
  machine().faults().set(device,
                         {static_cast<cudaError_t>(cuda_error), std::move(message)});
}

void complain(const std::string& message) {
  // One write, so that lines of several processes do not mix.
  const std::string line = "weightsync emulator: " + message + "\n";
  (void)!::write(STDERR_FILENO, line.data(), line.size());
}

shm::Result<void*> vmm_reserve(std::size_t nbytes, std::size_t alignment) {
  return machine().vmm().reserve(nbytes, alignment);
}

shm::Status vmm_free_range(void* base, std::size_t nbytes) {
  return machine().vmm().free_range(base, nbytes);
}

shm::Result<VmmHandle> vmm_create(const VmmTraits& traits) {
  if (shm::Status known = check_device(traits.device); !known.ok()) return known;
  return machine().vmm().create(traits);
}

shm::Status vmm_release(VmmHandle handle) { return machine().vmm().release(handle); }

std::optional<VmmTraits> vmm_traits(VmmHandle handle) {
  return machine().vmm().traits(handle);
}

shm::Result<VmmHandle> vmm_retain(const void* address) {
  return machine().vmm().retain(address);
}

shm::Status vmm_map(void* address, std::size_t nbytes, std::size_t offset,
                    VmmHandle handle) {
  return machine().vmm().map(address, nbytes, offset, handle);
}

shm::Status vmm_unmap(void* address, std::size_t nbytes) {
  if (const auto found = find_allocation(address)) {
    machine().streams().synchronize(found->device);
  }
  return machine().vmm().unmap(address, nbytes);
}

shm::Status vmm_set_access(void* address, std::size_t nbytes, VmmAccess access) {
  return machine().vmm().set_access(address, nbytes, access);
}

shm::Result<int> vmm_export(VmmHandle handle) {
  return machine().vmm().export_fd(handle);
}

shm::Result<VmmHandle> vmm_import(int fd) {
  return machine().vmm().import_fd(chosen_device(), fd);
}

}  // namespace weightsync::emulator
