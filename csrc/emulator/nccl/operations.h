// What api.cpp calls: one function for each function of nccl.h that moves data.
//
// The arguments are those of nccl.h, in its order, with the communicator found:
// api.cpp has refused dead handles (4), and nothing else. Each function checks in the
// order of the contract (usable() and ready() included) and adds an Operation or a
// HostStep to the group. Called on the caller's thread, inside a group unless it says
// "alone".
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "emulator/nccl/comm.h"
#include "emulator/nccl/outcome.h"
#include "nccl/abi.h"

namespace weightsync::emulator::nccl {

using CommunicatorPtr = std::shared_ptr<Communicator>;

// --- collectives.cpp ---
Outcome all_reduce(const void* sendbuff, void* recvbuff, std::size_t count,
                   ncclDataType_t datatype, ncclRedOp_t op,
                   const CommunicatorPtr& communicator, cudaStream_t stream);
Outcome reduce(const void* sendbuff, void* recvbuff, std::size_t count,
               ncclDataType_t datatype, ncclRedOp_t op, int root,
               const CommunicatorPtr& communicator, cudaStream_t stream);
// ncclBcast too: it is broadcast with both buffers the same.
Outcome broadcast(const void* sendbuff, void* recvbuff, std::size_t count,
                  ncclDataType_t datatype, int root,
                  const CommunicatorPtr& communicator, cudaStream_t stream);
Outcome reduce_scatter(const void* sendbuff, void* recvbuff, std::size_t recvcount,
                       ncclDataType_t datatype, ncclRedOp_t op,
                       const CommunicatorPtr& communicator, cudaStream_t stream);
Outcome all_gather(const void* sendbuff, void* recvbuff, std::size_t sendcount,
                   ncclDataType_t datatype, const CommunicatorPtr& communicator,
                   cudaStream_t stream);
Outcome all_to_all(const void* sendbuff, void* recvbuff, std::size_t count,
                   ncclDataType_t datatype, const CommunicatorPtr& communicator,
                   cudaStream_t stream);
Outcome gather(const void* sendbuff, void* recvbuff, std::size_t count,
               ncclDataType_t datatype, int root, const CommunicatorPtr& communicator,
               cudaStream_t stream);
Outcome scatter(const void* sendbuff, void* recvbuff, std::size_t count,
                ncclDataType_t datatype, int root, const CommunicatorPtr& communicator,
                cudaStream_t stream);

// --- point_to_point.cpp ---
Outcome send(const void* sendbuff, std::size_t count, ncclDataType_t datatype, int peer,
             const CommunicatorPtr& communicator, cudaStream_t stream);
Outcome recv(void* recvbuff, std::size_t count, ncclDataType_t datatype, int peer,
             const CommunicatorPtr& communicator, cudaStream_t stream);

// --- reduce.cpp; alone ---
Outcome red_op_create_pre_mul_sum(ncclRedOp_t* op, void* scalar,
                                  ncclDataType_t datatype,
                                  ncclScalarResidence_t residence,
                                  const CommunicatorPtr& communicator);
Outcome red_op_destroy(ncclRedOp_t op, const CommunicatorPtr& communicator);

// --- memory.cpp; alone ---
Outcome mem_alloc(void** ptr, std::size_t size);
Outcome mem_free(void* ptr);

// --- window.cpp ---
Outcome window_register(const CommunicatorPtr& communicator, void* buff,
                        std::size_t size, ncclWindow_t* win, int flags);
// Alone.
Outcome window_deregister(const CommunicatorPtr& communicator, ncclWindow_t win);
Outcome window_user_pointer(const CommunicatorPtr& communicator, ncclWindow_t win,
                            void** out);
// Whether host RMA works on this communicator: ncclCommQueryProperties. Alone.
bool has_host_rma(Communicator& communicator);

// --- rma.cpp ---
Outcome put_signal(const void* localbuff, std::size_t count, ncclDataType_t datatype,
                   int peer, ncclWindow_t window, std::size_t offset, int signal_index,
                   int context, unsigned int flags, const CommunicatorPtr& communicator,
                   cudaStream_t stream);
Outcome signal(int peer, int signal_index, int context, unsigned int flags,
               const CommunicatorPtr& communicator, cudaStream_t stream);
Outcome wait_signal(int count, const ncclWaitSignalDesc_t* descriptors,
                    const CommunicatorPtr& communicator, cudaStream_t stream);

}  // namespace weightsync::emulator::nccl
