#include "emulator/nccl/window_rules.h"

namespace weightsync::emulator::nccl {
namespace {

constexpr std::array<Row<RegisterCall>, 3> kArguments{{
    {[](const RegisterCall& call) {
       return refuse_if(!call.comm_valid, ncclInvalidArgument);
     },
     "the communicator is NULL or not one"},
    {[](const RegisterCall& call) {
       return refuse_if(!call.handle_given, ncclInvalidArgument);
     },
     "there is no place for the window handle (win is NULL)"},
    {[](const RegisterCall& call) {
       return refuse_if(call.buffer == nullptr || call.nbytes == 0,
                        ncclInvalidArgument);
     },
     "the buffer is NULL or has no bytes"},
}};

constexpr std::array<Row<RegisterMemory>, 4> kMemory{{
    {[](const RegisterMemory& memory) {
       return refuse_if(memory.kind == MemoryKind::kNone, ncclUnhandledCudaError);
     },
     "the buffer is no device memory"},
    {[](const RegisterMemory& memory) {
       return refuse_if(memory.offset % kNcclWindowAlignment != 0, ncclInvalidArgument);
     },
     "the buffer does not start at a multiple of 4096 bytes from the start of its "
     "allocation"},
    {[](const RegisterMemory& memory) {
       return refuse_if(memory.kind == MemoryKind::kPlainDevice,
                        ncclUnhandledCudaError);
     },
     "the buffer comes from cudaMalloc; a window needs memory of ncclMemAlloc or "
     "cuMemCreate"},
    {[](const RegisterMemory& memory) {
       return refuse_if(memory.offset > memory.allocation_bytes ||
                            memory.nbytes > memory.allocation_bytes - memory.offset,
                        ncclUnhandledCudaError);
     },
     "the buffer reaches beyond the end of its allocation"},
}};

constexpr std::array<Row<DeregisterCall>, 2> kDeregister{{
    {[](const DeregisterCall& call) {
       return refuse_if(!call.comm_valid, ncclInvalidArgument);
     },
     "the communicator is NULL or not one"},
    {[](const DeregisterCall& call) {
       return refuse_if(call.handle_given && !call.handle_known, ncclInternalError);
     },
     "the window is unknown to this communicator, or deregistered already"},
}};

constexpr std::array<Row<UserPointerCall>, 4> kUserPointer{{
    {[](const UserPointerCall& call) {
       return refuse_if(!call.comm_valid, ncclInvalidArgument);
     },
     "the communicator is NULL or not one"},
    {[](const UserPointerCall& call) {
       return refuse_if(!call.result_given, ncclInvalidArgument);
     },
     "there is no place for the pointer (outUserPtr is NULL)"},
    {[](const UserPointerCall& call) {
       return refuse_if(call.symmetric_support && !call.handle_given,
                        ncclInvalidArgument);
     },
     "the window is NULL"},
    {[](const UserPointerCall& call) {
       return refuse_if(call.symmetric_support && !call.handle_known,
                        ncclInternalError);
     },
     "the window is unknown to this communicator, or deregistered already"},
}};

}  // namespace

RegisterDecision decide_register_call(const RegisterCall& call) {
  if (const Decision refused = decide(kArguments, call); refused.code != ncclSuccess) {
    return {RegisterAction::kRefuse, refused};
  }
  if (!call.symmetric_support) return {RegisterAction::kLeaveNull, {}};
  if (call.readiness != ncclSuccess) {
    return {RegisterAction::kRefuse,
            {call.readiness, "an earlier operation of the communicator is unfinished"}};
  }
  return {RegisterAction::kQueue, {}};
}

Decision decide_register_memory(const RegisterMemory& memory) {
  return decide(kMemory, memory);
}

Decision decide_deregister(const DeregisterCall& call) {
  return decide(kDeregister, call);
}

Decision decide_user_pointer(const UserPointerCall& call) {
  return decide(kUserPointer, call);
}

}  // namespace weightsync::emulator::nccl
