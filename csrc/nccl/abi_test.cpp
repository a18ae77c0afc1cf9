// abi.h against the nccl.h of an installed NCCL, where CMake found one.
#include <gtest/gtest.h>
#include <limits.h>
#include <stddef.h>
#include <stdint.h>

#include "nccl/abi.h"

#if __has_include(<nccl.h>)
// Its macros are global, its types are not.
#include <cuda_runtime.h>
namespace real {
#include <nccl.h>
}

namespace {

#define SAME(name) \
  static_assert(static_cast<long long>(::name) == static_cast<long long>(real::name))
SAME(ncclSuccess);
SAME(ncclUnhandledCudaError);
SAME(ncclSystemError);
SAME(ncclInternalError);
SAME(ncclInvalidArgument);
SAME(ncclInvalidUsage);
SAME(ncclRemoteError);
SAME(ncclInProgress);
SAME(ncclTimeout);
SAME(ncclNumResults);
SAME(ncclSum);
SAME(ncclProd);
SAME(ncclMax);
SAME(ncclMin);
SAME(ncclAvg);
SAME(ncclNumOps);
SAME(ncclMaxRedOp);
SAME(ncclInt8);
SAME(ncclUint8);
SAME(ncclInt32);
SAME(ncclUint32);
SAME(ncclInt64);
SAME(ncclUint64);
SAME(ncclFloat16);
SAME(ncclFloat32);
SAME(ncclFloat64);
SAME(ncclBfloat16);
SAME(ncclFloat8e4m3);
SAME(ncclFloat8e5m2);
SAME(ncclNumTypes);
SAME(ncclScalarDevice);
SAME(ncclScalarHostImmediate);
SAME(ncclStatGpuMemSuspend);
SAME(ncclStatGpuMemSuspended);
SAME(ncclStatGpuMemPersist);
SAME(ncclStatGpuMemTotal);
#undef SAME

#define SAME_PLACE(type, field)                                           \
  static_assert(offsetof(::type, field) == offsetof(real::type, field) && \
                sizeof(::type::field) == sizeof(real::type::field))
SAME_PLACE(ncclConfig_t, size);
SAME_PLACE(ncclConfig_t, magic);
SAME_PLACE(ncclConfig_t, version);
SAME_PLACE(ncclConfig_t, blocking);
SAME_PLACE(ncclConfig_t, cgaClusterSize);
SAME_PLACE(ncclConfig_t, minCTAs);
SAME_PLACE(ncclConfig_t, maxCTAs);
SAME_PLACE(ncclConfig_t, netName);
SAME_PLACE(ncclConfig_t, splitShare);
SAME_PLACE(ncclConfig_t, trafficClass);
SAME_PLACE(ncclConfig_t, commName);
SAME_PLACE(ncclConfig_t, collnetEnable);
SAME_PLACE(ncclConfig_t, CTAPolicy);
SAME_PLACE(ncclConfig_t, shrinkShare);
SAME_PLACE(ncclConfig_t, nvlsCTAs);
SAME_PLACE(ncclConfig_t, nChannelsPerNetPeer);
SAME_PLACE(ncclConfig_t, nvlinkCentricSched);
SAME_PLACE(ncclConfig_t, graphUsageMode);
SAME_PLACE(ncclConfig_t, numRmaCtx);
SAME_PLACE(ncclConfig_t, maxP2pPeers);
SAME_PLACE(ncclConfig_t, graphStreamOrdering);
SAME_PLACE(ncclSimInfo_t, size);
SAME_PLACE(ncclSimInfo_t, magic);
SAME_PLACE(ncclSimInfo_t, version);
SAME_PLACE(ncclSimInfo_t, estimatedTime);
SAME_PLACE(ncclWaitSignalDesc_t, opCnt);
SAME_PLACE(ncclWaitSignalDesc_t, peer);
SAME_PLACE(ncclWaitSignalDesc_t, sigIdx);
SAME_PLACE(ncclWaitSignalDesc_t, ctx);
#undef SAME_PLACE

static_assert(sizeof(::ncclConfig_t) == sizeof(real::ncclConfig_t));
static_assert(sizeof(::ncclSimInfo_t) == sizeof(real::ncclSimInfo_t));
static_assert(sizeof(::ncclUniqueId) == sizeof(real::ncclUniqueId));
static_assert(sizeof(::ncclWaitSignalDesc_t) == sizeof(real::ncclWaitSignalDesc_t));
static_assert(sizeof(::ncclResult_t) == sizeof(real::ncclResult_t));
static_assert(sizeof(::ncclRedOp_t) == sizeof(real::ncclRedOp_t));
static_assert(sizeof(::ncclDataType_t) == sizeof(real::ncclDataType_t));
static_assert(sizeof(::ncclScalarResidence_t) == sizeof(real::ncclScalarResidence_t));

static_assert(kNcclVersion == NCCL_VERSION_CODE);
static_assert(kNcclApiMagic == NCCL_API_MAGIC);
static_assert(kNcclUndefInt == NCCL_CONFIG_UNDEF_INT);
static_assert(kNcclSplitNoColor == NCCL_SPLIT_NOCOLOR);
static_assert(kNcclWindowAlignment == NCCL_WIN_REQUIRED_ALIGNMENT);
static_assert(kNcclWindowDefault == NCCL_WIN_DEFAULT);
static_assert(kNcclWindowCollSymmetric == NCCL_WIN_COLL_SYMMETRIC);
static_assert(kNcclWindowStrictOrdering == NCCL_WIN_STRICT_ORDERING);
static_assert(kNcclShrinkDefault == NCCL_SHRINK_DEFAULT);
static_assert(kNcclShrinkAbort == NCCL_SHRINK_ABORT);
static_assert(kNcclRevokeDefault == NCCL_REVOKE_DEFAULT);
static_assert(kNcclSuspendMemory == NCCL_SUSPEND_MEM);

TEST(NcclAbiTest, ItIsThatOfNcclH) {
  const real::ncclSimInfo_t info = NCCL_SIM_INFO_INITIALIZER;

  EXPECT_EQ(kNcclSimInfoMagic, info.magic);
}

}  // namespace

#else

TEST(NcclAbiTest, ItIsThatOfNcclH) { GTEST_SKIP() << "there is no nccl.h"; }

#endif
