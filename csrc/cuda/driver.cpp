#include "cuda/driver.h"

#include <string>

#include "cuda/runtime.h"

namespace weightsync::cuda {
namespace {

using shm::Code;
using shm::Result;
using shm::Status;

constexpr int kReadWrite = 3;

// Which version of a function: that of the first CUDA with windows.
constexpr unsigned kVersion = 12000;

CUdeviceptr number(void* address) { return reinterpret_cast<CUdeviceptr>(address); }

template <class Found>
void find(Found& function) {
  void* pointer = nullptr;
  auto found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      runtime().driver_entry_point(function.name(), &pointer, kVersion, 0, &found);
  if (error == cudaSuccess && found == cudaDriverEntryPointSuccess) {
    function.take(pointer);
  }
}

// Gives the range back where something fails.
Status map_at(CUdeviceptr address, std::size_t bytes, int device,
              CUmemGenericAllocationHandle handle) {
  const Driver& cuda = driver();
  Status status = cuda.check(cuda.map(address, bytes, 0, handle, 0), "cuMemMap");
  if (status.ok()) {
    const CUmemAccessDesc access = {{1, device}, kReadWrite};
    status = cuda.check(cuda.set_access(address, bytes, &access, 1), "cuMemSetAccess");
    if (!status.ok()) (void)cuda.unmap(address, bytes);
  }
  if (!status.ok()) (void)cuda.free_range(address, bytes);
  return status;
}

}  // namespace

Status Driver::check(CUresult error, const char* call) const {
  if (error == CUDA_SUCCESS) return {};
  const auto number = static_cast<int>(error);
  if (number == kMissingFunction) {
    return {Code::kUnsupported,
            std::string(call) + " is not to be had: this process has no CUDA driver"};
  }
  return {Code::kSystem, std::string(call) + " failed: " + std::to_string(number)};
}

const Driver& driver() {
  static const Driver* const found = [] {
    auto* const made = new Driver();
    find(made->reserve);
    find(made->free_range);
    find(made->retain);
    find(made->release);
    find(made->map);
    find(made->unmap);
    find(made->set_access);
    return made;
  }();
  return *found;
}

Result<void*> map_again(void* base, std::size_t bytes, int device) {
  const Driver& cuda = driver();
  CUmemGenericAllocationHandle handle = 0;
  Status status = cuda.check(cuda.retain(&handle, base), "cuMemRetainAllocationHandle");
  if (!status.ok()) return status;
  CUdeviceptr address = 0;
  status = cuda.check(cuda.reserve(&address, bytes, 0, 0, 0), "cuMemAddressReserve");
  if (status.ok()) status = map_at(address, bytes, device, handle);
  (void)cuda.release(handle);  // the mapping keeps the memory
  if (!status.ok()) return status;
  // It came as a number. NOLINTNEXTLINE(performance-no-int-to-ptr)
  return reinterpret_cast<void*>(address);
}

Status unmap(void* base, std::size_t bytes) {
  const Driver& cuda = driver();
  Status status = cuda.check(cuda.unmap(number(base), bytes), "cuMemUnmap");
  if (!status.ok()) return status;
  return cuda.check(cuda.free_range(number(base), bytes), "cuMemAddressFree");
}

}  // namespace weightsync::cuda
