#include <gtest/gtest.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <string>
#include <vector>

#include "emulator/nccl/config_support.h"
#include "emulator/nccl/diagnosis.h"
#include "emulator/nccl/rank_support.h"

namespace weightsync::emulator::nccl {
namespace {

using Codes = std::vector<ncclResult_t>;

// The outcome of ncclCommInitRank on each rank, on these devices; destroys what it
// made.
Codes init_on(const std::vector<int>& devices) {
  const ncclUniqueId id = new_unique_id();
  const int size = static_cast<int>(devices.size());
  Codes codes(devices.size());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      ASSERT_TRUE(set_current_device(devices[rank]).ok());
      ncclComm_t communicator = nullptr;
      codes[rank] = ncclCommInitRank(&communicator, size, id, rank);
      if (communicator != nullptr) ncclCommDestroy(communicator);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return codes;
}

TEST(BootstrapTest, EveryRankLearnsRankSizeAndDevice) {
  as_threads(4, [](Rank& self) {
    int rank = -1;
    int size = -1;
    int device = -1;
    EXPECT_EQ(ncclSuccess, ncclCommUserRank(self.communicator, &rank));
    EXPECT_EQ(ncclSuccess, ncclCommCount(self.communicator, &size));
    EXPECT_EQ(ncclSuccess, ncclCommCuDevice(self.communicator, &device));

    EXPECT_EQ(self.rank, rank);
    EXPECT_EQ(4, size);
    EXPECT_EQ(self.rank, device);
  });
}

TEST(BootstrapTest, SixteenRanksJoinOnSharedDevices) {
  ::setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  std::vector<int> devices;
  for (int rank = 0; rank < 16; ++rank) devices.push_back(rank % 8);
  const Codes codes = init_on(devices);
  ::unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");

  EXPECT_EQ(Codes(16, ncclSuccess), codes);
}

TEST(BootstrapTest, TwoRanksOnOneDeviceAreRefused) {
  EXPECT_EQ((Codes{ncclInvalidUsage, ncclInvalidUsage}), init_on({3, 3}));
}

// Bodies of processes: each is run by a test below, as a program of its own, and not by
// itself. Hence disabled.
TEST(BootstrapTest, DISABLED_Process) {
  be_this_process([](Rank& self) {
    int size = 0;
    EXPECT_EQ(ncclSuccess, ncclCommCount(self.communicator, &size));
    EXPECT_EQ(self.size, size);
  });
}

TEST(BootstrapTest, ProcessesJoin) {
  const std::vector<int> codes = as_processes(3, "BootstrapTest.DISABLED_Process");

  EXPECT_EQ(std::vector<int>(3, 0), codes);
}

std::ptrdiff_t open_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return std::distance(begin(all), end(all));
}

TEST(BootstrapTest, ARankThatDiesBeforeAllHaveComeIsARemoteErrorAndLeavesNothing) {
  (void)new_unique_id();  // Boards of earlier communicators go.
  const std::ptrdiff_t before = open_descriptors();
  const ncclUniqueId id = new_unique_id();
  RankProcess other("BootstrapTest.DISABLED_Process", 1, 3, id);
  std::thread killer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    other.kill();
    other.wait();
  });
  ncclComm_t communicator = nullptr;
  const ncclResult_t code = ncclCommInitRank(&communicator, 3, id, 0);
  killer.join();

  EXPECT_EQ(ncclRemoteError, code);
  EXPECT_EQ(nullptr, communicator);
  EXPECT_EQ(before, open_descriptors());
}

TEST(BootstrapTest, ARankThatNeverComesIsWaitedFor) {
  EXPECT_EQ((std::vector<int>{diagnosis::kHangExitCode, -SIGKILL}),
            as_processes(2, "BootstrapTest.DISABLED_Process",
                         {"WEIGHTSYNC_EMULATOR_HANG_SECONDS=1",
                          "RANK=", "WEIGHTSYNC_EMULATOR_FAULTS=init@rank=1:kill"}));
}

TEST(BootstrapTest, AnIdOfAProcessThatIsGoneIsARemoteError) {
  int fds[2];
  ASSERT_EQ(0, ::pipe(fds));
  ncclUniqueId id{};
  const pid_t child = ::fork();
  if (child == 0) {
    ncclGetUniqueId(&id);
    (void)!::write(fds[1], &id, sizeof id);
    ::_exit(0);
  }
  ASSERT_EQ(static_cast<ssize_t>(sizeof id), ::read(fds[0], &id, sizeof id));
  ::waitpid(child, nullptr, 0);
  ::close(fds[0]);
  ::close(fds[1]);
  ncclComm_t communicator = nullptr;
  const ncclResult_t code = ncclCommInitRank(&communicator, 2, id, 0);

  EXPECT_EQ(ncclRemoteError, code);
  EXPECT_EQ(nullptr, communicator);
}

TEST(BootstrapTest, BytesThatAreNoIdAreRefused) {
  ncclUniqueId id{};
  ncclComm_t communicator = nullptr;

  EXPECT_EQ(ncclInvalidArgument, ncclCommInitRank(&communicator, 1, id, 0));
  EXPECT_EQ(nullptr, communicator);
  EXPECT_EQ(ncclInvalidArgument, ncclGetUniqueId(nullptr));
}

TEST(BootstrapTest, AnIdServesOneCommunicator) {
  const ncclUniqueId id = new_unique_id();
  ncclComm_t first = nullptr;
  ncclComm_t second = nullptr;
  EXPECT_EQ(ncclSuccess, ncclCommInitRank(&first, 1, id, 0));

  EXPECT_NE(ncclSuccess, ncclCommInitRank(&second, 1, id, 0));
  EXPECT_EQ(nullptr, second);
  EXPECT_EQ(ncclSuccess, ncclCommDestroy(first));
}

TEST(BootstrapTest, RanksThatDisagreeAboutTheSizeAreRefused) {
  const ncclUniqueId id = new_unique_id();
  std::vector<ncclResult_t> codes(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      ncclComm_t communicator = nullptr;
      codes[rank] = ncclCommInitRank(&communicator, 2 + rank, id, rank);
    });
  }
  for (std::thread& thread : threads) thread.join();

  EXPECT_NE(ncclSuccess, codes[0]);
  EXPECT_NE(ncclSuccess, codes[1]);
}

TEST(BootstrapTest, ArgumentsAreChecked) {
  const ncclUniqueId id = new_unique_id();
  ncclUniqueId ids[2] = {id, id};
  ncclConfig_t broken = undefined_config();
  broken.magic = 1;
  ncclComm_t communicator = nullptr;

  EXPECT_EQ(ncclInvalidArgument, ncclCommInitRank(nullptr, 1, id, 0));
  EXPECT_EQ(ncclInvalidArgument, ncclCommInitRank(&communicator, 0, id, 0));
  EXPECT_EQ(ncclInvalidArgument, ncclCommInitRank(&communicator, 2, id, -1));
  EXPECT_EQ(ncclInvalidArgument, ncclCommInitRank(&communicator, 2, id, 2));
  EXPECT_EQ(ncclInvalidArgument,
            ncclCommInitRankConfig(&communicator, 1, id, 0, &broken));
  EXPECT_EQ(ncclInvalidArgument,
            ncclCommInitRankScalable(&communicator, 1, 0, 0, ids, nullptr));
  EXPECT_EQ(ncclInvalidArgument,
            ncclCommInitRankScalable(&communicator, 1, 0, 2, ids, nullptr));
  EXPECT_EQ(nullptr, communicator);
}

TEST(BootstrapTest, ScalableInitTakesSeveralIds) {
  ncclUniqueId ids[2] = {new_unique_id(), new_unique_id()};
  Codes codes(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      ASSERT_TRUE(set_current_device(rank).ok());
      ncclComm_t communicator = nullptr;
      codes[rank] = ncclCommInitRankScalable(&communicator, 2, rank, 2, ids, nullptr);
      ncclCommDestroy(communicator);
    });
  }
  for (std::thread& thread : threads) thread.join();

  EXPECT_EQ((Codes{ncclSuccess, ncclSuccess}), codes);
}

TEST(BootstrapTest, OneThreadMakesAllRanksAtOnce) {
  ncclComm_t communicators[4] = {};
  const int devices[4] = {3, 1, 0, 2};
  const ncclResult_t code = ncclCommInitAll(communicators, 4, devices);

  EXPECT_EQ(ncclSuccess, code);
  for (int rank = 0; rank < 4; ++rank) {
    int device = -1;
    EXPECT_EQ(ncclSuccess, ncclCommCuDevice(communicators[rank], &device));
    EXPECT_EQ(devices[rank], device);
    EXPECT_EQ(ncclSuccess, ncclCommDestroy(communicators[rank]));
  }
}

TEST(BootstrapTest, InitAllChecksItsDevices) {
  ncclComm_t communicators[2] = {};
  const int twice[2] = {1, 1};
  const int wrong[2] = {0, 99};

  EXPECT_EQ(ncclInvalidUsage, ncclCommInitAll(communicators, 2, twice));
  EXPECT_EQ(ncclInvalidArgument, ncclCommInitAll(communicators, 2, wrong));
  EXPECT_EQ(ncclInvalidArgument, ncclCommInitAll(communicators, -1, nullptr));
  EXPECT_EQ(ncclInvalidArgument, ncclCommInitAll(nullptr, 1, nullptr));
}

TEST(BootstrapTest, ARankThatIsAbortedWhileItJoinsGivesUp) {
  const ncclUniqueId id = new_unique_id();
  ncclConfig_t config = nonblocking_config();
  ncclComm_t communicator = nullptr;
  const ncclResult_t begun = ncclCommInitRankConfig(&communicator, 2, id, 0, &config);

  EXPECT_EQ(ncclInProgress, begun);
  EXPECT_EQ(ncclSuccess, ncclCommAbort(communicator));
}

}  // namespace
}  // namespace weightsync::emulator::nccl
