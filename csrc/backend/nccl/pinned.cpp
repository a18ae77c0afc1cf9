#include "backend/nccl/pinned.h"

#include <c10/core/DeviceGuard.h>

#include <utility>

#include "backend/nccl/runs_nccl.h"
#include "backend/nccl/session.h"
#include "backend/status_error.h"
#include "cuda/runtime.h"

namespace weightsync {

using shm::Code;

PinnedMemory::PinnedMemory(at::Tensor memory) : memory_(std::move(memory)) {
  check(memory_.is_cpu() && memory_.scalar_type() == at::kByte && memory_.dim() == 1 &&
            memory_.is_contiguous(),
        Code::kInvalid, "only bytes of the host can be pinned");
  const cuda::Runtime& cuda = cuda::runtime();
  const cudaError_t error = cuda.host_register(
      memory_.mutable_data_ptr(), static_cast<std::size_t>(memory_.numel()), 0);
  // CUDA remembers an error until somebody asks, and torch would take it for its own.
  if (error != cudaSuccess) static_cast<void>(cuda.get_last_error());
  check(cuda.check(error, "cudaHostRegister"));
  pinned_ = true;
}

void PinnedMemory::copy_in(const std::vector<at::Tensor>& tensors,
                           const at::Tensor& table) const {
  check(!tensors.empty() && tensors.front().is_cuda(), Code::kInvalid,
        "only tensors on a GPU are copied into pinned memory");
  const c10::Device device = tensors.front().device();
  const auto runs = resolve_runs(tensors, table, memory_.numel(), device);
  auto* const base = static_cast<std::byte*>(memory_.mutable_data_ptr());
  const c10::DeviceGuard on(device);
  const cudaStream_t stream = handle_of(current_stream(device));
  for (const RunNccl& run : runs) {
    if (run.empty()) continue;
    copy_rows(base + run.at_window, run.window_stride, run.at_tensor, run.tensor_stride,
              run, cudaMemcpyDeviceToHost, stream);
  }
}

void PinnedMemory::close() {
  if (!pinned_.exchange(false)) return;
  const cuda::Runtime& cuda = cuda::runtime();
  if (cuda.host_unregister(memory_.mutable_data_ptr()) != cudaSuccess) {
    static_cast<void>(cuda.get_last_error());
  }
}

}  // namespace weightsync
