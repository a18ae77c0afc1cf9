// ncclMemAlloc and ncclMemFree.
#include <string>

#include "emulator/core.h"
#include "emulator/nccl/operations.h"
#include "emulator/nccl/process_faults.h"
#include "emulator/nccl/stall.h"
#include "emulator/nccl/switches.h"

namespace weightsync::emulator::nccl {
namespace {

Outcome cuda_error(const std::string& what) { return {ncclUnhandledCudaError, what}; }

}  // namespace

Outcome mem_alloc(void** ptr, std::size_t size) {
  const Action fault =
      process_faults().next(OperationKind::kMemAlloc, process_faults().process_rank());
  if (const int code = failed(fault); code != 0) {
    return {static_cast<ncclResult_t>(code), "a fault was asked for: " + fault.entry};
  }
  (void)carry_out_watched(fault);
  if (ptr == nullptr) return cuda_error("there is no place for the pointer");
  *ptr = nullptr;
  // cudaMalloc of nothing gives nothing.
  if (size == 0) return {};
  const Kind kind = switches().cumem ? Kind::kVmm : Kind::kMalloc;
  shm::Result<Allocation> made = allocate(current_device(), kind, size);
  if (!made.ok()) {
    return cuda_error(std::to_string(size) + " bytes on device " +
                      std::to_string(current_device()) + ": " +
                      made.status().message());
  }
  *ptr = made.value().base;
  return {};
}

Outcome mem_free(void* ptr) {
  if (ptr == nullptr) return {};
  const std::optional<Allocation> found = find_allocation(ptr);
  if (!found || !is_device_memory(found->kind)) {
    return cuda_error("the pointer is no device memory");
  }
  if (const shm::Status freed = release(ptr); !freed.ok()) {
    return cuda_error(freed.message());
  }
  return {};
}

}  // namespace weightsync::emulator::nccl
