// How torch's dtypes and reductions are those of NCCL.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <cstddef>

#include "nccl/communicator.h"

namespace weightsync {

// What NCCL moves for the elements of a tensor: two real numbers for a complex one, one
// byte for a truth value.
struct Elements {
  ncclDataType_t type = ncclUint8;
  std::size_t each = 1;  // elements of NCCL for one of torch
};

// TypeError for a dtype that NCCL has not.
Elements elements_of(c10::ScalarType dtype);

// For one call: NCCL's operator for a reduction of tensors of this dtype, made for this
// communicator if it has a factor, and given back at the end. Alive until the call that
// uses it has returned. TypeError where NCCL cannot do it.
class Reduction {
 public:
  Reduction(const c10d::ReduceOp& reduction, c10::ScalarType dtype,
            nccl::Communicator& communicator);
  ~Reduction();
  Reduction(const Reduction&) = delete;
  Reduction& operator=(const Reduction&) = delete;

  ncclRedOp_t get() const { return op_; }

 private:
  nccl::Communicator& communicator_;
  ncclRedOp_t op_ = ncclSum;
  bool made_ = false;
  at::Tensor factor_;  // on the device, if it is one
};

// Raises what Reduction would for the same, before anything is done.
void check_reduction(const c10d::ReduceOp& reduction, c10::ScalarType dtype);

}  // namespace weightsync
