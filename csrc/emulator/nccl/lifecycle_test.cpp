#include <dirent.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "emulator/nccl/config_support.h"
#include "emulator/nccl/rank_support.h"
#include "shm/test_support.h"

namespace weightsync::emulator::nccl {
namespace {

ncclComm_t alone(ncclConfig_t config = undefined_config()) {
  const ncclUniqueId id = new_unique_id();
  ncclComm_t communicator = nullptr;
  const ncclResult_t code = ncclCommInitRankConfig(&communicator, 1, id, 0, &config);
  EXPECT_TRUE(code == ncclSuccess || code == ncclInProgress) << code;
  EXPECT_EQ(ncclSuccess, poll(communicator));
  return communicator;
}

TEST(LifecycleTest, NoCommunicatorIsNothingToEndAndNothingToAsk) {
  int value = 0;
  ncclResult_t state = ncclSuccess;

  EXPECT_EQ(ncclSuccess, ncclCommDestroy(nullptr));
  EXPECT_EQ(ncclSuccess, ncclCommAbort(nullptr));
  EXPECT_EQ(ncclSuccess, ncclCommFinalize(nullptr));
  EXPECT_EQ(ncclSuccess, ncclCommRevoke(nullptr, 7));
  EXPECT_EQ(ncclInvalidArgument, ncclCommCount(nullptr, &value));
  EXPECT_EQ(ncclInvalidArgument, ncclCommUserRank(nullptr, &value));
  EXPECT_EQ(ncclInvalidArgument, ncclCommCuDevice(nullptr, &value));
  EXPECT_EQ(ncclInvalidArgument, ncclCommGetAsyncError(nullptr, &state));
}

TEST(LifecycleTest, AForeignOrDeadHandleIsRefused) {
  int something = 0;
  auto* const foreign = reinterpret_cast<ncclComm_t>(&something);
  ncclComm_t dead = alone();
  EXPECT_EQ(ncclSuccess, ncclCommDestroy(dead));

  EXPECT_EQ(ncclInvalidArgument, ncclCommCount(foreign, &something));
  EXPECT_EQ(ncclInvalidArgument, ncclCommDestroy(foreign));
  EXPECT_EQ(ncclInvalidArgument, ncclCommDestroy(dead));
  EXPECT_EQ(ncclInvalidArgument, ncclCommAbort(dead));
}

TEST(LifecycleTest, GettersRefuseNullResults) {
  ncclComm_t communicator = alone();

  EXPECT_EQ(ncclInvalidArgument, ncclCommCount(communicator, nullptr));
  EXPECT_EQ(ncclInvalidArgument, ncclCommGetAsyncError(communicator, nullptr));
  EXPECT_EQ(ncclSuccess, ncclCommDestroy(communicator));
}

TEST(LifecycleTest, ACommunicatorIsFinalizedOnce) {
  ncclComm_t communicator = alone();

  EXPECT_EQ(ncclSuccess, ncclCommFinalize(communicator));
  EXPECT_EQ(ncclInvalidArgument, ncclCommFinalize(communicator));
  EXPECT_EQ(ncclInvalidArgument, ncclCommRevoke(communicator, 0));
  EXPECT_EQ(ncclSuccess, ncclCommDestroy(communicator));
}

TEST(LifecycleTest, ARevokedCommunicatorTakesNoOperations) {
  ncclComm_t communicator = alone();
  EXPECT_EQ(ncclInvalidArgument, ncclCommRevoke(communicator, 1));
  EXPECT_EQ(ncclSuccess, ncclCommRevoke(communicator, 0));
  const DeviceBuffer buffer(0, 64);

  EXPECT_EQ(ncclInvalidUsage, ncclAllReduce(buffer.data(), buffer.data(), 4, ncclInt32,
                                            ncclSum, communicator, nullptr));
  EXPECT_EQ(ncclInvalidUsage, ncclSignal(0, 0, 0, 0, communicator, nullptr));
  EXPECT_EQ(ncclInvalidArgument, ncclCommRevoke(communicator, 0));
  EXPECT_EQ(ncclInvalidArgument, ncclCommFinalize(communicator));
  EXPECT_EQ(ncclSuccess, ncclCommDestroy(communicator));
}

TEST(LifecycleTest, NonblockingCallsAreInProgressUntilPolled) {
  const ncclUniqueId id = new_unique_id();
  ncclConfig_t config = nonblocking_config();
  ncclComm_t first = nullptr;
  const ncclResult_t begun = ncclCommInitRankConfig(&first, 2, id, 0, &config);
  int size = 0;
  const ncclResult_t early = ncclCommCount(first, &size);
  const ncclResult_t destroyed_early = ncclCommDestroy(first);
  ncclComm_t second = nullptr;
  {
    ASSERT_TRUE(set_current_device(1).ok());
    ncclCommInitRankConfig(&second, 2, id, 1, &config);
    ASSERT_TRUE(set_current_device(0).ok());
  }

  EXPECT_EQ(ncclInProgress, begun);
  EXPECT_NE(nullptr, first);
  EXPECT_EQ(ncclInvalidArgument, early);
  EXPECT_EQ(ncclInvalidArgument, destroyed_early);
  EXPECT_EQ(ncclSuccess, poll(first));
  EXPECT_EQ(ncclSuccess, poll(second));
  EXPECT_EQ(ncclSuccess, ncclCommCount(first, &size));
  EXPECT_EQ(2, size);
  EXPECT_EQ(ncclInProgress, ncclCommFinalize(second));
  EXPECT_EQ(ncclSuccess, poll(second));
  EXPECT_EQ(ncclSuccess, ncclCommDestroy(second));
  EXPECT_EQ(ncclSuccess, ncclCommAbort(first));
}

TEST(LifecycleTest, ANonblockingFailureStaysUntilTheCommunicatorIsAborted) {
  const ncclUniqueId id = new_unique_id();
  ncclConfig_t config = nonblocking_config();
  ncclComm_t communicators[2] = {};
  for (int rank = 0; rank < 2; ++rank) {  // both on device 0
    EXPECT_EQ(ncclInProgress,
              ncclCommInitRankConfig(&communicators[rank], 2, id, rank, &config));
  }
  ncclComm_t handles[2] = {communicators[0], communicators[1]};
  int size = 0;

  for (ncclComm_t each : handles) {
    EXPECT_EQ(ncclInvalidUsage, poll(each));
    EXPECT_EQ(ncclInvalidUsage, ncclCommCount(each, &size));
    EXPECT_EQ(ncclInvalidUsage, ncclCommDestroy(each));
    EXPECT_EQ(ncclSuccess, ncclCommAbort(each));
  }
}

TEST(LifecycleTest, ANonblockingRevokeReturnsAtOnce) {
  ncclComm_t communicator = alone(nonblocking_config());

  EXPECT_EQ(ncclInProgress, ncclCommRevoke(communicator, 0));
  EXPECT_EQ(ncclSuccess, poll(communicator));
  EXPECT_EQ(ncclSuccess, ncclCommDestroy(communicator));
}

TEST(LifecycleTest, AbortEndsACollectiveThatWaitsForARankThatNeverComes) {
  as_threads(2, [](Rank& self) {
    const DeviceBuffer buffer(self.device, 64);
    if (self.rank == 0) {
      EXPECT_EQ(ncclSuccess, ncclAllReduce(buffer.data(), buffer.data(), 4, ncclInt32,
                                           ncclSum, self.communicator, self.stream));
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      EXPECT_FALSE(stream_of(self.stream)->is_idle());
    }
    EXPECT_EQ(ncclSuccess, ncclCommAbort(std::exchange(self.communicator, nullptr)));
    self.synchronize();
  });
}

TEST(LifecycleTest, RevokeEndsACollectiveAndLeavesTheCommunicatorQuiet) {
  as_threads(2, [](Rank& self) {
    const DeviceBuffer buffer(self.device, 64);
    if (self.rank == 1) {
      EXPECT_EQ(ncclSuccess, ncclAllReduce(buffer.data(), buffer.data(), 4, ncclInt32,
                                           ncclSum, self.communicator, self.stream));
    }
    EXPECT_EQ(ncclSuccess, ncclCommRevoke(self.communicator, 0));
    self.synchronize();
    ncclResult_t state = ncclInternalError;

    EXPECT_EQ(ncclSuccess, ncclCommGetAsyncError(self.communicator, &state));
    EXPECT_EQ(ncclSuccess, state);
  });
}

TEST(LifecycleTest, ASuspendedCommunicatorTakesNoOperations) {
  ncclComm_t communicator = alone();
  std::uint64_t suspended = 7;

  EXPECT_EQ(ncclInvalidArgument, ncclCommSuspend(nullptr, kNcclSuspendMemory));
  EXPECT_EQ(ncclInvalidUsage, ncclCommResume(communicator));
  EXPECT_EQ(ncclSuccess, ncclCommSuspend(communicator, kNcclSuspendMemory));
  EXPECT_EQ(ncclSuccess,
            ncclCommMemStats(communicator, ncclStatGpuMemSuspended, &suspended));
  EXPECT_EQ(1U, suspended);
  EXPECT_EQ(ncclInvalidUsage, ncclSignal(0, 0, 0, 0, communicator, nullptr));
  EXPECT_EQ(ncclSuccess, ncclCommResume(communicator));
  EXPECT_EQ(
      ncclInvalidArgument,
      ncclCommMemStats(communicator, static_cast<ncclCommMemStat_t>(4), &suspended));
  EXPECT_EQ(ncclInvalidArgument,
            ncclCommMemStats(communicator, ncclStatGpuMemTotal, nullptr));
  EXPECT_EQ(ncclSuccess, ncclCommDestroy(communicator));
}

TEST(LifecycleTest, RegistrationsAreCounted) {
  ncclComm_t communicator = alone();
  char buffer[64];
  void* first = nullptr;
  void* second = nullptr;
  EXPECT_EQ(ncclSuccess, ncclCommRegister(communicator, buffer, 64, &first));
  EXPECT_EQ(ncclSuccess, ncclCommRegister(communicator, buffer + 8, 8, &second));

  EXPECT_EQ(first, second);
  EXPECT_EQ(ncclSuccess, ncclCommDeregister(communicator, nullptr));
  EXPECT_EQ(ncclSuccess, ncclCommDeregister(communicator, first));
  EXPECT_EQ(ncclSuccess, ncclCommDeregister(communicator, second));
  EXPECT_EQ(ncclInvalidUsage, ncclCommDeregister(communicator, first));
  EXPECT_EQ(ncclInvalidArgument, ncclCommRegister(nullptr, buffer, 8, &first));
  EXPECT_EQ(ncclSuccess, ncclCommDestroy(communicator));
}

TEST(LifecycleTest, ErrorsHaveTheTextsOfNccl) {
  ncclComm_t none = nullptr;
  int value = 0;
  EXPECT_EQ(ncclInvalidArgument, ncclCommCount(none, &value));

  EXPECT_STREQ("no error", ncclGetErrorString(ncclSuccess));
  EXPECT_STREQ("invalid usage (run with NCCL_DEBUG=WARN for details)",
               ncclGetErrorString(ncclInvalidUsage));
  EXPECT_STREQ("timeout", ncclGetErrorString(ncclTimeout));
  EXPECT_STREQ("unknown result code", ncclGetErrorString(ncclNumResults));
  EXPECT_STREQ("ncclCommCount on the emulator: the communicator is NULL",
               ncclGetLastError(nullptr));
}

TEST(LifecycleTest, ManyCommunicatorsLeaveNoMemoryAndNoDescriptorBehind) {
  const auto cycle = [] {
    as_threads(2, [](Rank&) {});
    ncclCommDestroy(alone(nonblocking_config()));
  };
  cycle();
  const std::size_t descriptors = shm::open_descriptors();
  const std::size_t segments = shm::segments_mapped();
  for (int i = 0; i < 20; ++i) cycle();

  EXPECT_EQ(descriptors, shm::open_descriptors());
  EXPECT_EQ(segments, shm::segments_mapped());
}

}  // namespace
}  // namespace weightsync::emulator::nccl
