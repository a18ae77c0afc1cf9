// What the files of operations share: sizes as NCCL counts them, and checks of what is
// passed. Each check raises before anything is enqueued.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <vector>

#include "backend/nccl/dtypes.h"
#include "backend/nccl/raising.h"

namespace weightsync {

inline std::size_t count_of(const at::Tensor& tensor) {
  return static_cast<std::size_t>(tensor.numel()) *
         elements_of(tensor.scalar_type()).each;
}

inline ncclDataType_t type_of(const at::Tensor& tensor) {
  return elements_of(tensor.scalar_type()).type;
}

inline void check_call(nccl::Communicator& on, ncclResult_t result, const char* call) {
  raise(on.library().check(result, call));
}

inline void check_root(std::int64_t root, int size, const char* call) {
  TORCH_CHECK_VALUE(root >= 0 && root < size, call, ": there is no rank ", root,
                    " in a group of ", size);
}

inline void check_same_dtype(const at::Tensor& one, const at::Tensor& other,
                             const char* call) {
  TORCH_CHECK_TYPE(one.scalar_type() == other.scalar_type(), call,
                   ": all tensors must be of one dtype; found ", one.scalar_type(),
                   " and ", other.scalar_type());
}

// That `large` holds as many elements as `small` of every rank.
inline void check_shares(const at::Tensor& large, const at::Tensor& small, int size,
                         const char* call) {
  check_same_dtype(large, small, call);
  TORCH_CHECK_VALUE(large.numel() == small.numel() * size, call,
                    ": the sizes do not fit: expected ", size, " times ", small.numel(),
                    " elements in the larger tensor, found ", large.numel());
}

// What a reduction reads besides the tensors has to live as long.
inline void keep_factor(const c10d::ReduceOp& reduction,
                        std::vector<at::Tensor>& kept) {
  const auto* const supplement =
      dynamic_cast<c10d::PreMulSumSupplement*>(reduction.supplement_.get());
  if (supplement == nullptr || !supplement->tensor_factor.defined()) return;
  if (supplement->tensor_factor.is_cuda()) kept.push_back(supplement->tensor_factor);
}

}  // namespace weightsync
