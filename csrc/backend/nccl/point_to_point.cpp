// Send and receive. NCCL matches messages by their order, so tags say nothing.
#include "backend/nccl/nccl_call.h"
#include "backend/nccl/process_group_nccl.h"

namespace weightsync {
namespace {

using c10d::OpType;
using Tensors = ProcessGroupNccl::Tensors;

const at::Tensor& only(const Tensors& tensors, const char* call) {
  TORCH_CHECK_VALUE(tensors.size() == 1, call, ": expected one tensor, found ",
                    tensors.size());
  return tensors.front();
}

}  // namespace

void ProcessGroupNccl::check_not_alone(int peer, const char* call) const {
  TORCH_CHECK_VALUE(batch_ || peer != rank_, call, ": rank ", rank_,
                    " can send to itself only in a batch with the receive");
}

ProcessGroupNccl::WorkPointer ProcessGroupNccl::send(Tensors& tensors, int destination,
                                                     int) try {
  const at::Tensor tensor = only(tensors, "send");
  check_root(destination, size_, "send");
  check_not_alone(destination, "send");
  Call call{OpType::SEND, "send", {tensor}, {}};
  call.peer = destination;
  call.counts = false;
  call.grouped = false;
  return issue(std::move(call), [tensor, destination](nccl::Communicator& on,
                                                      cudaStream_t stream) {
    check_call(on,
               on.library().ncclSend(tensor.data_ptr(), count_of(tensor),
                                     type_of(tensor), destination, on.handle(), stream),
               "ncclSend");
  });
} catch (...) {
  return refused();
}

ProcessGroupNccl::WorkPointer ProcessGroupNccl::recv(Tensors& tensors, int source,
                                                     int) try {
  const at::Tensor tensor = only(tensors, "recv");
  check_root(source, size_, "recv");
  check_not_alone(source, "recv");
  Call call{OpType::RECV, "recv", {}, {tensor}};
  call.peer = source;
  call.counts = false;
  call.grouped = false;
  return issue(
      std::move(call), [tensor, source](nccl::Communicator& on, cudaStream_t stream) {
        check_call(on,
                   on.library().ncclRecv(tensor.data_ptr(), count_of(tensor),
                                         type_of(tensor), source, on.handle(), stream),
                   "ncclRecv");
      });
} catch (...) {
  return refused();
}

ProcessGroupNccl::WorkPointer ProcessGroupNccl::recvAnysource(Tensors&, int) try {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      "recv: NCCL cannot receive from any rank, so weightsync-nccl2 needs the source");
} catch (...) {
  return refused();
}

}  // namespace weightsync
