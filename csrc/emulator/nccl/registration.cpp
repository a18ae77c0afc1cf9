// ncclCommRegister: buffers that real NCCL maps for its transports. The emulator reads
// any memory, so a registration is only counted.
#include <mutex>

#include "emulator/nccl/environment.h"
#include "emulator/nccl/lifecycle.h"
#include "emulator/nccl/registrations.h"

namespace weightsync::emulator::nccl {
namespace {

struct LockedRegistrations {
  std::mutex mutex;
  Registrations registrations;  // guarded by mutex
};

}  // namespace

Outcome register_buffer(const CommunicatorPtr& communicator, void* buffer,
                        std::size_t nbytes, void** handle) {
  if (Outcome ready = communicator->ready(); !ready.ok()) return ready;
  if (handle == nullptr) return invalid_argument("the handle is NULL");
  *handle = nullptr;
  Outcome fault = meet_fault(OperationKind::kRegister, *communicator);
  if (!fault.ok()) return fault;
  if (environment("NCCL_LOCAL_REGISTER") == "0") return {};
  auto& part = communicator->part<LockedRegistrations>();
  const std::lock_guard lock(part.mutex);
  *handle = part.registrations.add(buffer, nbytes);
  return {};
}

Outcome deregister_buffer(const CommunicatorPtr& communicator, void* handle) {
  if (handle == nullptr) return {};
  auto& part = communicator->part<LockedRegistrations>();
  const std::lock_guard lock(part.mutex);
  if (part.registrations.remove(handle)) return {};
  return invalid_usage("the handle is not registered with " + communicator->describe());
}

}  // namespace weightsync::emulator::nccl
