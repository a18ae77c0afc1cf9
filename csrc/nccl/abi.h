// The types of nccl.h 2.30.7, declared here so that nothing needs a header of NCCL or
// CUDA. abi_test.cpp compares them with nccl.h where there is one; the functions are
// declared in prototypes.h.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

// NCCL_H_ is the guard of nccl.h: with that included, its types are the types.
#ifndef NCCL_H_

// The one type of CUDA that nccl.h uses.
using cudaStream_t = struct CUstream_st*;

using ncclComm_t = struct ncclComm*;
using ncclWindow_t = struct ncclWindow_vidmem*;
using ncclParamHandle_t = struct ncclParamHandle*;

#endif

inline constexpr int kNcclVersion = 23007;
inline constexpr unsigned int kNcclApiMagic = 0xcafebeef;
inline constexpr unsigned int kNcclSimInfoMagic = 0x74685283;
inline constexpr int kNcclUndefInt = INT_MIN;
inline constexpr int kNcclSplitNoColor = -1;
inline constexpr std::size_t kNcclWindowAlignment = 4096;

enum ncclWindowFlags : int {
  kNcclWindowDefault = 0,
  kNcclWindowCollSymmetric = 1,
  kNcclWindowStrictOrdering = 2,
};

inline constexpr int kNcclShrinkDefault = 0;
inline constexpr int kNcclShrinkAbort = 1;
inline constexpr int kNcclRevokeDefault = 0;
inline constexpr int kNcclSuspendMemory = 1;

inline constexpr std::size_t kNcclUniqueIdBytes = 128;

#ifndef NCCL_H_

struct ncclUniqueId {
  char internal[kNcclUniqueIdBytes];
};

// As in C: an enum of these has the size of an unsigned int, and callers pass any int.
enum ncclResult_t : unsigned int {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
  ncclTimeout = 8,
  ncclNumResults = 9,
};

enum ncclRedOp_t : int {
  ncclSum = 0,
  ncclProd = 1,
  ncclMax = 2,
  ncclMin = 3,
  ncclAvg = 4,
  ncclNumOps = 5,
  ncclMaxRedOp = INT_MAX,
};

enum ncclDataType_t : int {
  ncclInt8 = 0,
  ncclChar = 0,
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclInt = 2,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6,
  ncclHalf = 6,
  ncclFloat32 = 7,
  ncclFloat = 7,
  ncclFloat64 = 8,
  ncclDouble = 8,
  ncclBfloat16 = 9,
  ncclFloat8e4m3 = 10,
  ncclFloat8e5m2 = 11,
  ncclNumTypes = 12,
};

enum ncclScalarResidence_t : int {
  ncclScalarDevice = 0,
  ncclScalarHostImmediate = 1,
};

enum ncclCommMemStat_t : int {
  ncclStatGpuMemSuspend = 0,
  ncclStatGpuMemSuspended = 1,
  ncclStatGpuMemPersist = 2,
  ncclStatGpuMemTotal = 3,
};

// v23000. An older caller's is shorter: `size` says how long, `version` which fields
// it knows. A newer one's is longer; the rest is not ours to read.
struct ncclConfig_t {
  std::size_t size;
  unsigned int magic;
  unsigned int version;
  int blocking;
  int cgaClusterSize;
  int minCTAs;
  int maxCTAs;
  const char* netName;
  int splitShare;
  int trafficClass;
  const char* commName;
  int collnetEnable;
  int CTAPolicy;
  int shrinkShare;
  int nvlsCTAs;
  int nChannelsPerNetPeer;
  int nvlinkCentricSched;
  int graphUsageMode;
  int numRmaCtx;
  int maxP2pPeers;
  int graphStreamOrdering;
};

struct ncclSimInfo_t {
  std::size_t size;
  unsigned int magic;
  unsigned int version;
  float estimatedTime;
};

struct ncclWaitSignalDesc_t {
  int opCnt;
  int peer;
  int sigIdx;
  int ctx;
};

#endif

// --- of nccl_device.h: what its host functions need ---

struct ncclTeam_t {
  int nRanks;
  int rank;
  int stride;
};

struct ncclCommProperties_t {
  std::size_t size;
  unsigned int magic;
  unsigned int version;
  int rank;
  int nRanks;
  int cudaDev;
  int nvmlDev;
  bool deviceApiSupport;
  bool multimemSupport;
  int ginType;
  int nLsaTeams;
  bool hostRmaSupport;
  int railedGinType;
};
