// The collectives of single tensors, and those of several in one call.
#include <ATen/ops/empty.h>

#include "backend/nccl/nccl_call.h"
#include "backend/nccl/process_group_nccl.h"

namespace weightsync {
namespace {

using c10d::OpType;
using Tensors = ProcessGroupNccl::Tensors;

at::Tensor& only(Tensors& tensors, const char* call) {
  TORCH_CHECK_VALUE(tensors.size() == 1, call, ": expected one tensor, found ",
                    tensors.size());
  return tensors.front();
}

}  // namespace

ProcessGroupNccl::WorkPointer ProcessGroupNccl::broadcast(
    Tensors& tensors, const c10d::BroadcastOptions& opts) try {
  const at::Tensor tensor = only(tensors, "broadcast");
  check_root(opts.rootRank, size_, "broadcast");
  const int root = static_cast<int>(opts.rootRank);
  Call call{OpType::BROADCAST, "broadcast", {}, {tensor}, opts.asyncOp, opts.timeout};
  call.grouped = false;
  return issue(std::move(call), [tensor, root](nccl::Communicator& on,
                                               cudaStream_t stream) {
    void* const data = tensor.data_ptr();
    check_call(on,
               on.library().ncclBroadcast(data, data, count_of(tensor), type_of(tensor),
                                          root, on.handle(), stream),
               "ncclBroadcast");
  });
} catch (...) {
  return refused();
}

ProcessGroupNccl::WorkPointer ProcessGroupNccl::allreduce(
    Tensors& tensors, const c10d::AllreduceOptions& opts) try {
  TORCH_CHECK(!opts.sparseIndices, "all_reduce of sparse tensors is not supported");
  only(tensors, "all_reduce");
  c10d::AllreduceCoalescedOptions same;
  static_cast<c10d::AllreduceOptions&>(same) = opts;
  return allreduce_coalesced(tensors, same);
} catch (...) {
  return refused();
}

ProcessGroupNccl::WorkPointer ProcessGroupNccl::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) try {
  for (const at::Tensor& each : tensors) {
    check_reduction(opts.reduceOp, each.scalar_type());
  }
  const bool one = tensors.size() == 1;
  Call call{one ? OpType::ALLREDUCE : OpType::ALLREDUCE_COALESCED,
            "all_reduce",
            {},
            tensors,
            opts.asyncOp,
            opts.timeout};
  call.grouped = !one;
  keep_factor(opts.reduceOp, call.inputs);
  return issue(std::move(call), [tensors, reduction = opts.reduceOp](
                                    nccl::Communicator& on, cudaStream_t stream) {
    for (const at::Tensor& each : tensors) {
      const Reduction op(reduction, each.scalar_type(), on);
      void* const data = each.data_ptr();
      check_call(on,
                 on.library().ncclAllReduce(data, data, count_of(each), type_of(each),
                                            op.get(), on.handle(), stream),
                 "ncclAllReduce");
    }
  });
} catch (...) {
  return refused();
}

ProcessGroupNccl::WorkPointer ProcessGroupNccl::reduce(
    Tensors& tensors, const c10d::ReduceOptions& opts) try {
  const at::Tensor tensor = only(tensors, "reduce");
  check_root(opts.rootRank, size_, "reduce");
  check_reduction(opts.reduceOp, tensor.scalar_type());
  const int root = static_cast<int>(opts.rootRank);
  Call call{OpType::REDUCE, "reduce", {}, {tensor}, opts.asyncOp, opts.timeout};
  call.grouped = false;
  keep_factor(opts.reduceOp, call.inputs);
  return issue(std::move(call), [tensor, root, reduction = opts.reduceOp](
                                    nccl::Communicator& on, cudaStream_t stream) {
    const Reduction op(reduction, tensor.scalar_type(), on);
    void* const data = tensor.data_ptr();
    check_call(on,
               on.library().ncclReduce(data, data, count_of(tensor), type_of(tensor),
                                       op.get(), root, on.handle(), stream),
               "ncclReduce");
  });
} catch (...) {
  return refused();
}

ProcessGroupNccl::WorkPointer ProcessGroupNccl::all_gather_single(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) try {
  Tensors outputs{output};
  Tensors inputs{input};
  return all_gather_single_coalesced(outputs, inputs, opts);
} catch (...) {
  return refused();
}

ProcessGroupNccl::WorkPointer ProcessGroupNccl::all_gather_single_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) try {
  constexpr const char* kCall = "all_gather_single";
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), kCall, ": ", inputs.size(),
                    " inputs and ", outputs.size(), " outputs");
  for (std::size_t each = 0; each < inputs.size(); ++each) {
    check_shares(outputs[each], inputs[each], size_, kCall);
  }
  const auto type = inputs.size() == 1 ? OpType::_ALLGATHER_BASE
                                       : OpType::ALLGATHER_INTO_TENSOR_COALESCED;
  Call call{type, kCall, inputs, outputs, opts.asyncOp, opts.timeout};
  call.grouped = inputs.size() != 1;
  return issue(std::move(call),
               [inputs, outputs](nccl::Communicator& on, cudaStream_t stream) {
                 for (std::size_t each = 0; each < inputs.size(); ++each) {
                   const at::Tensor& input = inputs[each];
                   check_call(on,
                              on.library().ncclAllGather(
                                  input.data_ptr(), outputs[each].data_ptr(),
                                  count_of(input), type_of(input), on.handle(), stream),
                              "ncclAllGather");
                 }
               });
} catch (...) {
  return refused();
}

ProcessGroupNccl::WorkPointer ProcessGroupNccl::reduce_scatter_single(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) try {
  Tensors outputs{output};
  Tensors inputs{input};
  return reduce_scatter_single_coalesced(outputs, inputs, opts);
} catch (...) {
  return refused();
}

ProcessGroupNccl::WorkPointer ProcessGroupNccl::reduce_scatter_single_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) try {
  constexpr const char* kCall = "reduce_scatter_single";
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), kCall, ": ", inputs.size(),
                    " inputs and ", outputs.size(), " outputs");
  for (std::size_t each = 0; each < inputs.size(); ++each) {
    check_shares(inputs[each], outputs[each], size_, kCall);
    check_reduction(opts.reduceOp, inputs[each].scalar_type());
  }
  const auto type = inputs.size() == 1 ? OpType::_REDUCE_SCATTER_BASE
                                       : OpType::REDUCE_SCATTER_TENSOR_COALESCED;
  Call call{type, kCall, inputs, outputs, opts.asyncOp, opts.timeout};
  call.grouped = inputs.size() != 1;
  keep_factor(opts.reduceOp, call.inputs);
  return issue(std::move(call), [inputs, outputs, reduction = opts.reduceOp](
                                    nccl::Communicator& on, cudaStream_t stream) {
    for (std::size_t each = 0; each < inputs.size(); ++each) {
      const at::Tensor& output = outputs[each];
      const Reduction op(reduction, output.scalar_type(), on);
      check_call(on,
                 on.library().ncclReduceScatter(
                     inputs[each].data_ptr(), output.data_ptr(), count_of(output),
                     type_of(output), op.get(), on.handle(), stream),
                 "ncclReduceScatter");
    }
  });
} catch (...) {
  return refused();
}

// NCCL has none: every rank gives one byte to all, and what it is does not matter.
ProcessGroupNccl::WorkPointer ProcessGroupNccl::barrier(
    const c10d::BarrierOptions& opts) try {
  const c10::Device device = barrier_device(opts);
  const at::Tensor byte =
      at::empty({1}, at::TensorOptions().dtype(at::kByte).device(device));
  Call call{OpType::BARRIER, "barrier", {byte}, {}, true, opts.timeout, true};
  call.grouped = false;
  return issue(std::move(call), [byte](nccl::Communicator& on, cudaStream_t stream) {
    void* const data = byte.data_ptr();
    check_call(on,
               on.library().ncclAllReduce(data, data, 1, ncclUint8, ncclSum,
                                          on.handle(), stream),
               "ncclAllReduce");
  });
} catch (...) {
  return refused();
}

}  // namespace weightsync
