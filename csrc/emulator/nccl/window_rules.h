// What the window functions refuse, and in which order. Pure: facts in, decision out.
//
// A call has two parts. The first is checked when it is made, the second when the
// registration is carried out at the end of the group, on the host, with all ranks.
#pragma once

#include <cstddef>

#include "emulator/nccl/rules.h"

namespace weightsync::emulator::nccl {

// ncclCommWindowRegister, as called. The window handle is set to NULL as soon as it is
// known where it lies, that is, from the third row on.
struct RegisterCall {
  bool comm_valid = true;
  bool handle_given = true;
  const void* buffer = nullptr;
  std::size_t nbytes = 0;
  // Where support is missing the call succeeds and leaves the handle NULL.
  bool symmetric_support = true;
  ncclResult_t readiness = ncclSuccess;  // of the communicator
};

enum class RegisterAction { kRefuse, kLeaveNull, kQueue };

struct RegisterDecision {
  RegisterAction action = RegisterAction::kQueue;
  Decision decision;
};

RegisterDecision decide_register_call(const RegisterCall& call);

// What the memory is, as far as a window cares.
enum class MemoryKind { kNone, kPlainDevice, kVirtual, kVirtualHost };

// The local part of a registration, before any peer is asked.
struct RegisterMemory {
  MemoryKind kind = MemoryKind::kNone;
  std::size_t offset = 0;            // of the buffer from the start of its allocation
  std::size_t nbytes = 0;            // of the buffer
  std::size_t allocation_bytes = 0;  // from the start of the allocation
};

Decision decide_register_memory(const RegisterMemory& memory);

// ncclCommWindowDeregister. Neither readiness nor revocation matters.
struct DeregisterCall {
  bool comm_valid = true;
  bool handle_given = true;  // a NULL handle is accepted: nothing to do
  bool handle_known = true;
};

Decision decide_deregister(const DeregisterCall& call);

// ncclWinGetUserPtr. Without symmetric support it succeeds and gives NULL.
struct UserPointerCall {
  bool comm_valid = true;
  bool result_given = true;
  bool symmetric_support = true;
  bool handle_given = true;
  bool handle_known = true;
};

Decision decide_user_pointer(const UserPointerCall& call);

}  // namespace weightsync::emulator::nccl
