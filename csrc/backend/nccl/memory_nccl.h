// The memory that NCCL can make windows of, as torch's memory pools get it.
//
// torch.cuda.MemPool calls two plain functions, which know no process group: so the
// table of what they gave is one for the process. Any thread may call anything, with
// the GIL or without.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "nccl/windows.h"

namespace weightsync {

struct Allocation {
  std::byte* base = nullptr;
  std::size_t bytes = 0;
};

// The one that this address lies in, if it was given by allocate_nccl.
std::optional<Allocation> allocation_of(const void* address);

// These windows have registered the allocation, and are told before it is freed.
void remember(const Allocation& allocation, const std::shared_ptr<nccl::Windows>& by);

// The addresses of the functions that allocate and free, for torch's
// _cuda_customAllocator.
std::pair<std::uintptr_t, std::uintptr_t> nccl_memory_functions();

// A tensor in an allocation of its own, filled with zeroes. It is freed with its last
// view, when the device has done what it was given before.
at::Tensor allocate_nccl_tensor(std::int64_t size, const at::TensorOptions& options);

// The same memory at one more address, which is an allocation of its own to NCCL: so
// each of them can be registered with one communicator, and takes no more memory. The
// tensor begins at the start of its allocation.
at::Tensor map_nccl_tensor_again(const at::Tensor& tensor);

}  // namespace weightsync
