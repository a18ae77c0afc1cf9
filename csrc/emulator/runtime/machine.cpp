#include "machine.h"

#include <string>
#include <utility>

#include "queued_stream.h"

namespace weightsync::emulator {
namespace {

using shm::MutexLock;
using shm::Result;
using shm::Status;

thread_local int current = 0;

}  // namespace

Machine& machine() {
  static auto* const the_machine = new Machine(read_configuration());
  return *the_machine;
}

Kernels& kernels() {
  static auto* const the_kernels = new Kernels();
  return *the_kernels;
}

int chosen_device() { return current; }

Outcome choose_device(int device) {
  if (!machine().has(device)) {
    return {cudaErrorInvalidDevice, "asked for device " + std::to_string(device) +
                                        " of " + std::to_string(machine().devices())};
  }
  current = device;
  return {};
}

Machine::Machine(Configuration configuration)
    : configuration_(std::move(configuration)),
      memory_(devices(), configuration_.memory),
      vmm_(memory_),
      streams_(devices(), [this](int device, const std::string& reason) {
        faults_.set(device, {cudaErrorUnknown, reason});
      }) {}

Outcome Machine::check_process() const {
  if (!origin_.is_here()) {
    return {cudaErrorInitializationError,
            "this process was forked from one that uses CUDA; start it with the spawn "
            "method instead"};
  }
  if (running_stream() != nullptr) {
    return {cudaErrorNotPermitted, "called by an operation of " +
                                       running_stream()->name() +
                                       "; host functions must not call CUDA"};
  }
  if (devices() == 0) return {cudaErrorNoDevice, "the emulated machine has no device"};
  return {};
}

Outcome Machine::check(int device) {
  if (Outcome process = check_process(); !process.ok()) return process;
  if (has(device)) return faults_.of(device);
  return {cudaErrorInvalidDevice, "asked for device " + std::to_string(device) +
                                      " of " + std::to_string(devices())};
}

Result<Allocation> Machine::allocate_vmm(int device, std::size_t nbytes) {
  constexpr std::size_t kPiece = kVmmGranularity;
  const std::size_t rounded = (nbytes + kPiece - 1) / kPiece * kPiece;
  Result<VmmHandle> handle = vmm_.create({device, rounded, 1});
  if (!handle.ok()) return handle.status();
  Result<void*> base = vmm_.reserve(rounded, 0);
  Status done = base.status();
  if (done.ok()) done = vmm_.map(base.value(), rounded, 0, handle.value());
  if (done.ok()) done = vmm_.set_access(base.value(), rounded, VmmAccess::kReadWrite);
  (void)vmm_.release(handle.value());  // the mapping keeps the memory
  if (!done.ok()) return done;
  const std::optional<Allocation> made = memory_.find(base.value());
  if (!made) return Status(shm::Code::kSystem, "memory was freed while it was made");
  const MutexLock lock(mu_);
  vmm_bases_.insert(base.value());
  return *made;
}

bool Machine::release_vmm(void* base) {
  {
    const MutexLock lock(mu_);
    if (vmm_bases_.erase(base) == 0) return false;
  }
  const std::optional<Allocation> found = memory_.find(base);
  if (!found) return false;
  const Status unmapped = vmm_.unmap(base, found->nbytes);
  return unmapped.ok() && vmm_.free_range(base, found->nbytes).ok();
}

cudaEvent_t Machine::add(std::shared_ptr<Event> event) {
  const MutexLock lock(mu_);
  auto* const handle = reinterpret_cast<cudaEvent_t>(event.get());
  events_.emplace(handle, std::move(event));
  return handle;
}

std::shared_ptr<Event> Machine::event(cudaEvent_t handle) {
  const MutexLock lock(mu_);
  const auto found = events_.find(handle);
  return found == events_.end() ? nullptr : found->second;
}

bool Machine::remove(cudaEvent_t handle) {
  const MutexLock lock(mu_);
  return events_.erase(handle) > 0;
}

bool Machine::can_access(int device, int peer) {
  const MutexLock lock(mu_);
  return device == peer || access_.count({device, peer}) > 0;
}

bool Machine::set_access(int device, int peer, bool enabled) {
  const MutexLock lock(mu_);
  if (enabled) return access_.insert({device, peer}).second;
  return access_.erase({device, peer}) > 0;
}

void Machine::reset(int device) {
  streams_.synchronize(device);
  for (const Allocation& held : memory_.of_device(device)) {
    if (held.kind == Kind::kVmm) {
      release_vmm(held.base);
    } else if (held.kind == Kind::kIpc || held.kind == Kind::kHostRegistered) {
      memory_.remove(held.base);
    } else {
      (void)memory_.release(held.base);
    }
  }
  faults_.clear(device);
}

}  // namespace weightsync::emulator
