// A table of runs over device memory, checked.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/runs.h"
#include "cuda/abi.h"
#include "nccl/abi.h"

namespace weightsync {

struct RunNccl {
  std::size_t tensor = 0;  // which one
  std::byte* at_tensor = nullptr;
  bool on_host = false;       // the tensor, not the window
  std::size_t at_window = 0;  // bytes from its start
  std::size_t rows = 0;
  std::size_t row_bytes = 0;
  std::size_t tensor_stride = 0;
  std::size_t window_stride = 0;

  cudaMemcpyKind kind() const {  // of its copy to the window
    return on_host ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToDevice;
  }
  bool empty() const { return rows == 0 || row_bytes == 0; }
  // Whether its rows follow each other without a gap, on both sides.
  bool is_one_piece() const {
    return rows == 1 || (tensor_stride == row_bytes && window_stride == row_bytes);
  }
};

enum class Sides : std::uint8_t { kDevice, kDeviceOrHost };

// Checks every run against both sides, a window of so many bytes and tensors on this
// device, or on the host where that is allowed. Raises kInvalid.
std::vector<RunNccl> resolve_runs(const std::vector<at::Tensor>& tensors,
                                  const at::Tensor& table, std::int64_t window_nbytes,
                                  c10::Device device, Sides sides = Sides::kDevice);

// Enqueues the copy of the rows of a run, on the current device.
void copy_rows(std::byte* target, std::size_t target_stride, const std::byte* source,
               std::size_t source_stride, const RunNccl& run, cudaMemcpyKind kind,
               cudaStream_t stream);

// Copies runs of tensors, on the same device or the host, into memory of a device, on
// the current stream. It needs no window.
void copy_into(const at::Tensor& memory, const std::vector<at::Tensor>& tensors,
               const at::Tensor& table);

}  // namespace weightsync
