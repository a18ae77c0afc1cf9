// The collectives of nccl.h: their checks, in NCCL's order, and what they add to the
// group.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "emulator/core.h"
#include "emulator/nccl/collective_operation.h"
#include "emulator/nccl/collective_plan.h"
#include "emulator/nccl/group.h"
#include "emulator/nccl/operations.h"
#include "emulator/nccl/reduction_operators.h"
#include "emulator/nccl/stall.h"
#include "emulator/nccl/transfer.h"

namespace weightsync::emulator::nccl {

namespace {

// The arguments of any of them; those that a function does not have keep their value.
struct Arguments {
  Collective kind;
  const void* sendbuff;
  void* recvbuff;
  std::size_t count;
  ncclDataType_t datatype;
  ncclRedOp_t op = ncclSum;
  int root = 0;
};

// Runs at the call, in the order of the stream only, even inside a group.
Outcome enqueue_alone(CollectiveCall call, const CommunicatorPtr& communicator,
                      cudaStream_t stream) {
  const std::shared_ptr<Stream> target = stream_of(stream);
  if (!target) return {ncclUnhandledCudaError, "invalid stream"};
  const char* const what = function_of(call.asked.kind);
  target->enqueue(what, [call = std::move(call), communicator] {
    if (!carry_out_watched(*communicator, call.fault)) return;
    const Outcome outcome = run_alone(call, *communicator);
    if (!outcome.ok()) communicator->fail(outcome);
  });
  return {};
}

Outcome check(const Arguments& arguments, Communicator& communicator) {
  Outcome outcome =
      check_call(communicator, "root", arguments.root, arguments.datatype);
  if (outcome.ok() && reduces(arguments.kind)) {
    outcome = check_operator(communicator, arguments.op);
  }
  const std::size_t most = SIZE_MAX / 8 / static_cast<std::size_t>(communicator.size());
  if (outcome.ok() && arguments.count > most) {
    return invalid_argument("impossible count " + std::to_string(arguments.count));
  }
  return outcome;
}

Outcome collective(const Arguments& arguments, const CommunicatorPtr& communicator,
                   cudaStream_t stream) {
  if (Outcome checked = check(arguments, *communicator); !checked.ok()) return checked;
  CollectiveCall call;
  if (Outcome failed = ask_faults(fault_of(arguments.kind), *communicator, call.fault);
      !failed.ok()) {
    return failed;
  }
  if (arguments.count == 0) return {};
  if (reduces(arguments.kind)) {
    Outcome found =
        find_operator(*communicator, arguments.op, arguments.datatype, call.combine);
    if (!found.ok()) return found;
  }
  call.input = arguments.sendbuff;
  call.output = arguments.recvbuff;
  call.asked.kind = arguments.kind;
  call.asked.reduction = call.combine.reduction;
  call.asked.type = static_cast<DataType>(arguments.datatype);
  call.asked.root = arguments.root;
  call.asked.count = arguments.count;
  if (communicator->size() == 1) {
    return enqueue_alone(std::move(call), communicator, stream);
  }
  return add_operation(communicator,
                       std::make_shared<CollectiveOperation>(std::move(call)), stream);
}

}  // namespace

Outcome all_reduce(const void* sendbuff, void* recvbuff, std::size_t count,
                   ncclDataType_t datatype, ncclRedOp_t op,
                   const CommunicatorPtr& communicator, cudaStream_t stream) {
  return collective({Collective::kAllReduce, sendbuff, recvbuff, count, datatype, op},
                    communicator, stream);
}

Outcome reduce(const void* sendbuff, void* recvbuff, std::size_t count,
               ncclDataType_t datatype, ncclRedOp_t op, int root,
               const CommunicatorPtr& communicator, cudaStream_t stream) {
  return collective(
      {Collective::kReduce, sendbuff, recvbuff, count, datatype, op, root},
      communicator, stream);
}

Outcome broadcast(const void* sendbuff, void* recvbuff, std::size_t count,
                  ncclDataType_t datatype, int root,
                  const CommunicatorPtr& communicator, cudaStream_t stream) {
  return collective(
      {Collective::kBroadcast, sendbuff, recvbuff, count, datatype, ncclSum, root},
      communicator, stream);
}

Outcome reduce_scatter(const void* sendbuff, void* recvbuff, std::size_t recvcount,
                       ncclDataType_t datatype, ncclRedOp_t op,
                       const CommunicatorPtr& communicator, cudaStream_t stream) {
  return collective(
      {Collective::kReduceScatter, sendbuff, recvbuff, recvcount, datatype, op},
      communicator, stream);
}

Outcome all_gather(const void* sendbuff, void* recvbuff, std::size_t sendcount,
                   ncclDataType_t datatype, const CommunicatorPtr& communicator,
                   cudaStream_t stream) {
  return collective({Collective::kAllGather, sendbuff, recvbuff, sendcount, datatype},
                    communicator, stream);
}

Outcome all_to_all(const void* sendbuff, void* recvbuff, std::size_t count,
                   ncclDataType_t datatype, const CommunicatorPtr& communicator,
                   cudaStream_t stream) {
  return collective({Collective::kAllToAll, sendbuff, recvbuff, count, datatype},
                    communicator, stream);
}

Outcome gather(const void* sendbuff, void* recvbuff, std::size_t count,
               ncclDataType_t datatype, int root, const CommunicatorPtr& communicator,
               cudaStream_t stream) {
  return collective(
      {Collective::kGather, sendbuff, recvbuff, count, datatype, ncclSum, root},
      communicator, stream);
}

Outcome scatter(const void* sendbuff, void* recvbuff, std::size_t count,
                ncclDataType_t datatype, int root, const CommunicatorPtr& communicator,
                cudaStream_t stream) {
  return collective(
      {Collective::kScatter, sendbuff, recvbuff, count, datatype, ncclSum, root},
      communicator, stream);
}

}  // namespace weightsync::emulator::nccl
