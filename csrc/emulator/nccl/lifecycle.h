// The life of communicators: what api_comm.cpp calls. One function for each function
// of nccl.h, called inside a group unless it says "alone".
#pragma once

#include <cstdint>
#include <memory>

#include "emulator/faults.h"
#include "emulator/nccl/comm.h"
#include "emulator/nccl/group.h"
#include "emulator/nccl/outcome.h"
#include "nccl/abi.h"

namespace weightsync::emulator::nccl {

using CommunicatorPtr = std::shared_ptr<Communicator>;

// --- lifecycle.cpp ---
Outcome init_rank(ncclComm_t* newcomm, int nranks, int rank, int id_count,
                  const ncclUniqueId* ids, const ncclConfig_t* config);
Outcome init_all(ncclComm_t* comms, int device_count, const int* devices);
Outcome finalize(const CommunicatorPtr& communicator);
Outcome destroy(const CommunicatorPtr& communicator);
Outcome abort_operations(const CommunicatorPtr& communicator);
Outcome revoke(const CommunicatorPtr& communicator, int flags);
// Alone.
Outcome suspend(const CommunicatorPtr& communicator, int flags);
Outcome resume(const CommunicatorPtr& communicator);
Outcome memory_stat(const CommunicatorPtr& communicator, ncclCommMemStat_t stat,
                    std::uint64_t* value);
Outcome async_error(const CommunicatorPtr& communicator, ncclResult_t* result);

// --- family.cpp ---
Outcome split(const CommunicatorPtr& parent, int color, int key, ncclComm_t* newcomm,
              const ncclConfig_t* config);
Outcome shrink(const CommunicatorPtr& parent, int* excluded, int excluded_count,
               ncclComm_t* newcomm, const ncclConfig_t* config, int flags);

// --- growth.cpp ---
// Alone.
Outcome unique_id_for_growth(const CommunicatorPtr& parent, ncclUniqueId* id);
// `parent` is null for a new rank.
Outcome grow(const CommunicatorPtr& parent, int nranks, const ncclUniqueId* id,
             int rank, ncclComm_t* newcomm, const ncclConfig_t* config);

// --- registration.cpp; alone ---
Outcome register_buffer(const CommunicatorPtr& communicator, void* buffer,
                        std::size_t nbytes, void** handle);
Outcome deregister_buffer(const CommunicatorPtr& communicator, void* handle);

// --- shared by these files ---

// The fault of this process that meets a host operation: its code, after its delay.
Outcome meet_fault(OperationKind operation, Communicator& communicator);
// The step by which a communicator comes to be: joins with the id, and is gone again if
// that, or the group, fails.
HostStep creation_step(const CommunicatorPtr& child, const ncclUniqueId& id,
                       ncclComm_t* newcomm, OperationKind operation);

}  // namespace weightsync::emulator::nccl
