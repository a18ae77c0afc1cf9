// Ranks that disagree, die or leave: what the others hear, between processes.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "emulator/nccl/diagnosis.h"
#include "emulator/nccl/window_support.h"

namespace weightsync::emulator::nccl {
namespace {

using Codes = std::vector<int>;

const std::string kLimit = "WEIGHTSYNC_EMULATOR_HANG_SECONDS=1";
const std::string kStrict = "WEIGHTSYNC_EMULATOR_STRICT=1";

std::string fault(const std::string& text) {
  return "WEIGHTSYNC_EMULATOR_FAULTS=" + text;
}

bool says(const Watched& watched, const std::string& text) {
  return watched.printed.find(text) != std::string::npos;
}

// Bodies of processes: each is run by a test below, as a program of its own, and not by
// itself. Hence disabled.
TEST(DISABLED_Departing, joins) {
  if (std::getenv("WEIGHTSYNC_TEST_ID") == nullptr) GTEST_SKIP() << "part of a test";
  const int rank = told_number("WEIGHTSYNC_TEST_RANK");
  ASSERT_TRUE(set_current_device(rank).ok());
  ncclComm_t comm = nullptr;
  EXPECT_EQ(ncclInvalidUsage, ncclCommInitRank(&comm, 2, told_id(), rank));
  EXPECT_EQ(nullptr, comm);
  EXPECT_NE(nullptr, std::strstr(ncclGetLastError(nullptr), "has NCCL 2"));
}

TEST(Departure, ranks_of_different_versions_do_not_come_together) {
  const ncclUniqueId id = new_unique_id();
  RankProcess older("DISABLED_Departing.joins", 0, 2, id);
  RankProcess newer("DISABLED_Departing.joins", 1, 2, id,
                    {"WEIGHTSYNC_EMULATOR_NCCL=2.31.2"});

  EXPECT_EQ(0, older.wait_in_time());
  EXPECT_EQ(0, newer.wait_in_time());
}

void end_here() { ::_exit(::testing::Test::HasFailure() ? 1 : 0); }

TEST(DISABLED_Departing, splits) {
  be_this_process([](Rank& self) {
    ncclComm_t child = nullptr;
    EXPECT_EQ(ncclRemoteError, ncclCommSplit(self.communicator, 0, 0, &child, nullptr));
    EXPECT_EQ(nullptr, child);
    end_here();
  });
}

TEST(Departure, a_rank_that_dies_in_a_split_is_a_remote_error_of_the_others) {
  EXPECT_EQ((Codes{0, 0, -SIGKILL}),
            as_processes(3, "DISABLED_Departing.splits",
                         {fault("split@rank=2:kill"), "RANK="}));
}

TEST(DISABLED_Departing, registers) {
  be_this_process([](Rank& self) {
    const DeviceBuffer memory(self.device, 4096, Kind::kVmm);
    ncclWindow_t window = nullptr;
    EXPECT_EQ(ncclRemoteError, ncclCommWindowRegister(self.communicator, memory.data(),
                                                      8, &window, kSymmetric));
    EXPECT_EQ(nullptr, window);
    end_here();
  });
}

TEST(Departure, a_rank_that_dies_in_a_registration_is_a_remote_error_of_the_others) {
  EXPECT_EQ((Codes{0, -SIGKILL}),
            as_processes(2, "DISABLED_Departing.registers",
                         {fault("window_register@rank=1:kill"), "RANK="}));
}

TEST(DISABLED_Departing, gathers) {
  print_for_the_watcher();
  be_this_process([](Rank& self) {
    const DeviceBuffer memory(self.device, 64);
    EXPECT_EQ(ncclSuccess, ncclAllGather(memory.data() + 4 * self.rank, memory.data(),
                                         1, ncclInt32, self.communicator, self.stream));
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    ncclResult_t error = ncclInternalError;
    EXPECT_EQ(ncclSuccess, ncclCommGetAsyncError(self.communicator, &error));
    if (error != ncclSuccess) ::_exit(4);  // nobody tells
    self.synchronize();
  });
}

TEST(Departure, a_rank_that_dies_in_an_all_gather_leaves_the_others_waiting) {
  const Watched watched =
      watch_processes(3, "DISABLED_Departing.gathers",
                      {kLimit, fault("all_gather@rank=1:kill"), "RANK="});
  const int hang = diagnosis::kHangExitCode;

  EXPECT_EQ((Codes{hang, -SIGKILL, hang}), watched.codes);
  EXPECT_TRUE(says(watched, "in ncclAllGather of 1 int32")) << watched.printed;
  EXPECT_TRUE(says(watched, " is dead"));
}

TEST(DISABLED_Departing, destroys_while_another_stays) {
  print_for_the_watcher();
  be_this_process([](Rank& self) {
    meet(self);
    if (std::getenv("WEIGHTSYNC_TEST_FINALIZES") != nullptr) {
      EXPECT_EQ(ncclSuccess, ncclCommFinalize(self.communicator));
    }
    if (self.rank == 1) std::this_thread::sleep_for(std::chrono::seconds(20));
    EXPECT_EQ(ncclSuccess, ncclCommDestroy(std::exchange(self.communicator, nullptr)));
    end_here();
  });
}

TEST(Departure, a_destroy_waits_for_no_other_rank) {
  const Watched watched = watch_processes(
      2, "DISABLED_Departing.destroys_while_another_stays", {kLimit}, Ends::kWithRank0);

  EXPECT_EQ((Codes{0, -SIGKILL}), watched.codes);
}

TEST(Departure, strictly_a_destroy_waits_for_the_ranks_of_other_processes) {
  const Watched watched =
      watch_processes(2, "DISABLED_Departing.destroys_while_another_stays",
                      {kLimit, kStrict}, Ends::kWithRank0);

  EXPECT_EQ((Codes{diagnosis::kHangExitCode, -SIGKILL}), watched.codes);
  EXPECT_TRUE(says(watched, "for rank 1 to destroy or abort its communicator too"))
      << watched.printed;
}

TEST(Departure, strictly_a_destroy_after_a_finalize_is_local) {
  const Watched watched = watch_processes(
      2, "DISABLED_Departing.destroys_while_another_stays",
      {kLimit, kStrict, "WEIGHTSYNC_TEST_FINALIZES=1"}, Ends::kWithRank0);

  EXPECT_EQ((Codes{0, -SIGKILL}), watched.codes);
}

TEST(DISABLED_Departing, destroys_or_dies) {
  be_this_process([](Rank& self) {
    meet(self);
    if (self.rank == 2) ::kill(::getpid(), SIGKILL);
    ncclComm_t const comm = std::exchange(self.communicator, nullptr);
    EXPECT_EQ(ncclSuccess,
              self.rank == 1 ? ncclCommAbort(comm) : ncclCommDestroy(comm));
  });
}

TEST(Departure, strictly_an_abort_and_a_death_are_departures_too) {
  EXPECT_EQ((Codes{0, 0, -SIGKILL}),
            as_processes(3, "DISABLED_Departing.destroys_or_dies", {kLimit, kStrict}));
}

TEST(Departure, strictly_one_process_may_destroy_its_ranks_one_by_one) {
  const Setting strict("WEIGHTSYNC_EMULATOR_STRICT", "1");
  ncclComm_t comms[2] = {};
  ASSERT_EQ(ncclSuccess, ncclCommInitAll(comms, 2, nullptr));

  for (ncclComm_t comm : comms) EXPECT_EQ(ncclSuccess, ncclCommDestroy(comm));
}

TEST(Departure, an_abort_breaks_a_registration_that_a_rank_does_not_join) {
  Steps steps;
  as_threads(2, [&](Rank& self) {
    if (self.rank == 1) {
      steps.await(1);
      return;
    }
    std::thread other([comm = self.communicator] {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      EXPECT_EQ(ncclSuccess, ncclCommAbort(comm));
    });
    const DeviceBuffer memory(self.device, 4096, Kind::kVmm);
    ncclWindow_t window = nullptr;
    EXPECT_NE(ncclSuccess, ncclCommWindowRegister(self.communicator, memory.data(), 8,
                                                  &window, kSymmetric));
    EXPECT_EQ(nullptr, window);
    other.join();
    self.communicator = nullptr;
    steps.reach(1);
  });
}

}  // namespace
}  // namespace weightsync::emulator::nccl
