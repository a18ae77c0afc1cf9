// The edge of the library: the functions of nccl.h that move data.
#include "emulator/nccl/entry.h"
#include "emulator/nccl/operations.h"
#include "emulator/nccl/symbols.h"

using namespace weightsync::emulator::nccl;  // NOLINT: this file is the edge

extern "C" {

ncclResult_t ncclAllReduce(const void* sendbuff, void* recvbuff, std::size_t count,
                           ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_on(site, comm, [=](const CommunicatorPtr& communicator) {
    return all_reduce(sendbuff, recvbuff, count, datatype, op, communicator, stream);
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclAllReduce)

ncclResult_t ncclReduce(const void* sendbuff, void* recvbuff, std::size_t count,
                        ncclDataType_t datatype, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_on(site, comm, [=](const CommunicatorPtr& communicator) {
    return reduce(sendbuff, recvbuff, count, datatype, op, root, communicator, stream);
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclReduce)

ncclResult_t ncclBroadcast(const void* sendbuff, void* recvbuff, std::size_t count,
                           ncclDataType_t datatype, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_on(site, comm, [=](const CommunicatorPtr& communicator) {
    return broadcast(sendbuff, recvbuff, count, datatype, root, communicator, stream);
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclBroadcast)

ncclResult_t ncclBcast(void* buff, std::size_t count, ncclDataType_t datatype, int root,
                       ncclComm_t comm, cudaStream_t stream) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_on(site, comm, [=](const CommunicatorPtr& communicator) {
    return broadcast(buff, buff, count, datatype, root, communicator, stream);
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclBcast)

ncclResult_t ncclReduceScatter(const void* sendbuff, void* recvbuff,
                               std::size_t recvcount, ncclDataType_t datatype,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_on(site, comm, [=](const CommunicatorPtr& communicator) {
    return reduce_scatter(sendbuff, recvbuff, recvcount, datatype, op, communicator,
                          stream);
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclReduceScatter)

ncclResult_t ncclAllGather(const void* sendbuff, void* recvbuff, std::size_t sendcount,
                           ncclDataType_t datatype, ncclComm_t comm,
                           cudaStream_t stream) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_on(site, comm, [=](const CommunicatorPtr& communicator) {
    return all_gather(sendbuff, recvbuff, sendcount, datatype, communicator, stream);
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclAllGather)

ncclResult_t ncclAlltoAll(const void* sendbuff, void* recvbuff, std::size_t count,
                          ncclDataType_t datatype, ncclComm_t comm,
                          cudaStream_t stream) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_on(site, comm, [=](const CommunicatorPtr& communicator) {
    return all_to_all(sendbuff, recvbuff, count, datatype, communicator, stream);
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclAlltoAll)

ncclResult_t ncclGather(const void* sendbuff, void* recvbuff, std::size_t count,
                        ncclDataType_t datatype, int root, ncclComm_t comm,
                        cudaStream_t stream) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_on(site, comm, [=](const CommunicatorPtr& communicator) {
    return gather(sendbuff, recvbuff, count, datatype, root, communicator, stream);
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclGather)

ncclResult_t ncclScatter(const void* sendbuff, void* recvbuff, std::size_t count,
                         ncclDataType_t datatype, int root, ncclComm_t comm,
                         cudaStream_t stream) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_on(site, comm, [=](const CommunicatorPtr& communicator) {
    return scatter(sendbuff, recvbuff, count, datatype, root, communicator, stream);
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclScatter)

ncclResult_t ncclSend(const void* sendbuff, std::size_t count, ncclDataType_t datatype,
                      int peer, ncclComm_t comm, cudaStream_t stream) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_on(site, comm, [=](const CommunicatorPtr& communicator) {
    return send(sendbuff, count, datatype, peer, communicator, stream);
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclSend)

ncclResult_t ncclRecv(void* recvbuff, std::size_t count, ncclDataType_t datatype,
                      int peer, ncclComm_t comm, cudaStream_t stream) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_on(site, comm, [=](const CommunicatorPtr& communicator) {
    return recv(recvbuff, count, datatype, peer, communicator, stream);
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclRecv)

ncclResult_t ncclPutSignal(const void* localbuff, std::size_t count,
                           ncclDataType_t datatype, int peer, ncclWindow_t peerWin,
                           std::size_t peerWinOffset, int sigIdx, int ctx,
                           unsigned int flags, ncclComm_t comm, cudaStream_t stream) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_on(site, comm, [=](const CommunicatorPtr& communicator) {
    return put_signal(localbuff, count, datatype, peer, peerWin, peerWinOffset, sigIdx,
                      ctx, flags, communicator, stream);
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclPutSignal)

ncclResult_t ncclSignal(int peer, int sigIdx, int ctx, unsigned int flags,
                        ncclComm_t comm, cudaStream_t stream) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_on(site, comm, [=](const CommunicatorPtr& communicator) {
    return signal(peer, sigIdx, ctx, flags, communicator, stream);
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclSignal)

ncclResult_t ncclWaitSignal(int nDesc, ncclWaitSignalDesc_t* signalDescs,
                            ncclComm_t comm, cudaStream_t stream) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_on(site, comm, [=](const CommunicatorPtr& communicator) {
    return wait_signal(nDesc, signalDescs, communicator, stream);
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclWaitSignal)

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar,
                                      ncclDataType_t datatype,
                                      ncclScalarResidence_t residence,
                                      ncclComm_t comm) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_alone_on(site, comm, [=](const CommunicatorPtr& communicator) {
    return red_op_create_pre_mul_sum(op, scalar, datatype, residence, communicator);
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclRedOpCreatePreMulSum)

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_alone_on(site, comm, [=](const CommunicatorPtr& communicator) {
    return red_op_destroy(op, communicator);
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclRedOpDestroy)

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buff, std::size_t size,
                                    ncclWindow_t* win, int winFlags) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_on(
      site, comm,
      [=](const CommunicatorPtr& communicator) {
        return window_register(communicator, buff, size, win, winFlags);
      },
      Progress::kSuccess);
}
WEIGHTSYNC_NCCL_P_NAME(ncclCommWindowRegister)

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_alone_on(site, comm, [=](const CommunicatorPtr& communicator) {
    return window_deregister(communicator, win);
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclCommWindowDeregister)

ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t win, void** outUserPtr) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_alone_on(site, comm, [=](const CommunicatorPtr& communicator) {
    return window_user_pointer(communicator, win, outUserPtr);
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclWinGetUserPtr)

ncclResult_t ncclMemAlloc(void** ptr, std::size_t size) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_alone(site, [=] { return mem_alloc(ptr, size); });
}
WEIGHTSYNC_NCCL_P_NAME(ncclMemAlloc)

ncclResult_t ncclMemFree(void* ptr) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_alone(site, [=] { return mem_free(ptr); });
}
WEIGHTSYNC_NCCL_P_NAME(ncclMemFree)

}  // extern "C"
