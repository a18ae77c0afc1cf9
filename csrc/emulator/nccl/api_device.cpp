// The edge of the library: the host functions of nccl_device.h. There are no kernels on
// the emulator, so what serves them only refuses.
#include "emulator/nccl/entry.h"
#include "emulator/nccl/operations.h"
#include "emulator/nccl/symbols.h"

using namespace weightsync::emulator::nccl;  // NOLINT: this file is the edge

namespace {

ncclResult_t refuse(const char* function) {
  return call_alone({function, nullptr}, [] {
    return invalid_usage("the emulator runs no kernels, so it has no device-side NCCL");
  });
}

// All ranks of a node reach each other, and there is one node: the teams of the world
// and of the load/store-accessible ranks are the same.
ncclTeam_t whole(ncclComm_t comm) {
  const CommunicatorPtr communicator = Communicator::find(comm);
  return communicator ? ncclTeam_t{communicator->size(), communicator->rank(), 1}
                      : ncclTeam_t{0, 0, 0};
}

Outcome describe(Communicator& communicator, ncclCommProperties_t* properties) {
  if (properties == nullptr || properties->magic != kNcclApiMagic) {
    return invalid_argument(
        "the properties were not initialised with NCCL_COMM_PROPERTIES_INITIALIZER");
  }
  if (Outcome ready = communicator.ready(); !ready.ok()) return ready;
  properties->rank = communicator.rank();
  properties->nRanks = communicator.size();
  properties->cudaDev = communicator.device();
  properties->nvmlDev = communicator.device();
  properties->deviceApiSupport = false;
  properties->multimemSupport = false;
  properties->ginType = 0;
  properties->nLsaTeams = 1;
  properties->hostRmaSupport = has_host_rma(communicator);
  properties->railedGinType = 0;
  return {};
}

}  // namespace

extern "C" {

ncclResult_t ncclCommQueryProperties(ncclComm_t comm, ncclCommProperties_t* props) {
  const CallSite site{__func__, __builtin_return_address(0)};
  return call_alone_on(site, comm, [=](const CommunicatorPtr& communicator) {
    return describe(*communicator, props);
  });
}
WEIGHTSYNC_NCCL_P_NAME(ncclCommQueryProperties)

ncclTeam_t ncclTeamWorld(ncclComm_t comm) { return whole(comm); }
WEIGHTSYNC_NCCL_P_NAME(ncclTeamWorld)

ncclTeam_t ncclTeamLsa(ncclComm_t comm) { return whole(comm); }
WEIGHTSYNC_NCCL_P_NAME(ncclTeamLsa)

ncclTeam_t ncclTeamRail(ncclComm_t comm) {
  return {1, 0, Communicator::find(comm) ? Communicator::find(comm)->size() : 0};
}
WEIGHTSYNC_NCCL_P_NAME(ncclTeamRail)

int ncclTeamRankToWorld(ncclComm_t comm, ncclTeam_t team, int rank) {
  return whole(comm).rank + (rank - team.rank) * team.stride;
}
WEIGHTSYNC_NCCL_P_NAME(ncclTeamRankToWorld)

int ncclTeamRankToLsa(ncclComm_t comm, ncclTeam_t team, int rank) {
  return whole(comm).rank + (rank - team.rank) * team.stride;
}
WEIGHTSYNC_NCCL_P_NAME(ncclTeamRankToLsa)

int ncclLLA2ACalcSlots(int /*maxElts*/, int /*maxEltSize*/) { return 0; }
WEIGHTSYNC_NCCL_P_NAME(ncclLLA2ACalcSlots)

ncclResult_t ncclDevCommCreate() { return refuse(__func__); }
WEIGHTSYNC_NCCL_P_NAME(ncclDevCommCreate)

ncclResult_t ncclDevCommDestroy() { return refuse(__func__); }
WEIGHTSYNC_NCCL_P_NAME(ncclDevCommDestroy)

ncclResult_t ncclGetLsaMultimemDevicePointer() { return refuse(__func__); }
WEIGHTSYNC_NCCL_P_NAME(ncclGetLsaMultimemDevicePointer)

ncclResult_t ncclGetMultimemDevicePointer() { return refuse(__func__); }
WEIGHTSYNC_NCCL_P_NAME(ncclGetMultimemDevicePointer)

ncclResult_t ncclGetLsaDevicePointer() { return refuse(__func__); }
WEIGHTSYNC_NCCL_P_NAME(ncclGetLsaDevicePointer)

ncclResult_t ncclGetPeerDevicePointer() { return refuse(__func__); }
WEIGHTSYNC_NCCL_P_NAME(ncclGetPeerDevicePointer)

ncclResult_t ncclGinBarrierCreateRequirement() { return refuse(__func__); }
WEIGHTSYNC_NCCL_P_NAME(ncclGinBarrierCreateRequirement)

ncclResult_t ncclGinInboxA2ACreateRequirement() { return refuse(__func__); }
WEIGHTSYNC_NCCL_P_NAME(ncclGinInboxA2ACreateRequirement)

ncclResult_t ncclGinOutboxCreateRequirement() { return refuse(__func__); }
WEIGHTSYNC_NCCL_P_NAME(ncclGinOutboxCreateRequirement)

ncclResult_t ncclLLA2ACreateRequirement() { return refuse(__func__); }
WEIGHTSYNC_NCCL_P_NAME(ncclLLA2ACreateRequirement)

ncclResult_t ncclLsaBarrierCreateRequirement() { return refuse(__func__); }
WEIGHTSYNC_NCCL_P_NAME(ncclLsaBarrierCreateRequirement)

}  // extern "C"
