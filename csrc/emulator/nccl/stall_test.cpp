// A rank that a fault stalls is diagnosed, whatever it is stalled in; an error is told.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "emulator/nccl/diagnosis.h"
#include "emulator/nccl/window_support.h"

namespace weightsync::emulator::nccl {
namespace {

constexpr const char* kBody = "DISABLED_Stall.calls_everything";

// Of a process that is stopped in one of these calls. Hence disabled.
TEST(DISABLED_Stall, calls_everything) {
  be_this_process([](Rank& self) {
    ncclComm_t comm = self.communicator;
    void* memory = nullptr;
    (void)ncclMemAlloc(&memory, 4096);
    ncclWindow_t window = nullptr;
    (void)ncclCommWindowRegister(comm, memory, 4096, &window, kSymmetric);
    void* handle = nullptr;
    (void)ncclCommRegister(comm, memory, 4096, &handle);
    (void)send_signal(self, 0);
    (void)wait_for(self, 0, 1);
    (void)ncclAllGather(memory, memory, 1, ncclInt32, comm, self.stream);
    ncclGroupStart();
    (void)ncclSend(memory, 1, ncclInt32, 0, comm, self.stream);
    (void)ncclRecv(memory, 1, ncclInt32, 0, comm, self.stream);
    ncclGroupEnd();
    self.synchronize();
    ncclComm_t child = nullptr;
    (void)ncclCommSplit(comm, 0, 0, &child, nullptr);
    (void)ncclCommRevoke(child, 0);
    (void)ncclCommAbort(child);
    (void)ncclCommFinalize(comm);
  });
}

TEST(Stall, ends_with_a_report_whatever_is_stalled) {
  const std::vector<std::string> operations = {
      "init",  "mem_alloc", "window_register", "register", "signal",
      "wait",  "send",      "all_gather",      "split",    "revoke",
      "abort", "finalize",  "destroy",
  };
  std::vector<ncclUniqueId> ids;
  std::vector<RankProcess> processes;
  for (const std::string& operation : operations) {
    ids.push_back(new_unique_id());
    processes.emplace_back(
        kBody, 0, 1, ids.back(),
        std::vector<std::string>{"WEIGHTSYNC_EMULATOR_HANG_SECONDS=0.3",
                                 "WEIGHTSYNC_EMULATOR_FAULTS=" + operation + ":stall"});
  }

  for (std::size_t i = 0; i < operations.size(); ++i) {
    EXPECT_EQ(diagnosis::kHangExitCode, processes[i].wait_in_time()) << operations[i];
  }
}

TEST(Stall, is_named_in_the_report) {
  const Watched watched =
      watch_processes(1, "DISABLED_Stall.is_watched",
                      {"WEIGHTSYNC_EMULATOR_HANG_SECONDS=0.3",
                       "WEIGHTSYNC_EMULATOR_FAULTS=all_gather:stall"});

  EXPECT_EQ(std::vector<int>{diagnosis::kHangExitCode}, watched.codes);
  EXPECT_NE(std::string::npos,
            watched.printed.find("for the end of the fault all_gather:stall"))
      << watched.printed;
}

TEST(DISABLED_Stall, is_watched) {
  print_for_the_watcher();
  be_this_process([](Rank& self) {
    const DeviceBuffer memory(self.device, 4);
    (void)ncclAllGather(memory.data(), memory.data(), 1, ncclInt32, self.communicator,
                        self.stream);
    self.synchronize();
  });
}

// The process is at its end soon after the limit; its stream and its abort are not.
TEST(DISABLED_Stall, is_set_apart) {
  print_for_the_watcher();
  be_this_process([](Rank& self) {
    (void)send_signal(self, 0);
    std::thread([comm = self.communicator] { (void)ncclCommAbort(comm); }).detach();
    std::this_thread::sleep_for(std::chrono::milliseconds(900));
    ::_exit(0);
  });
}

TEST(Stall, that_is_set_apart_is_reported_once_and_ends_nothing) {
  const std::string limit = "WEIGHTSYNC_EMULATOR_HANG_SECONDS=0.3";
  const std::string stall = "WEIGHTSYNC_EMULATOR_FAULTS=signal:stall";
  const std::string body = "DISABLED_Stall.is_set_apart";
  const Watched watched = watch_processes(1, body, {limit, stall + "; set-apart"});
  const std::size_t first = watched.printed.find("set apart: rank 0 of 1");

  EXPECT_EQ(std::vector<int>{0}, watched.codes);
  EXPECT_NE(std::string::npos, first) << watched.printed;
  EXPECT_EQ(std::vector<int>{diagnosis::kHangExitCode},
            watch_processes(1, body, {limit, stall}).codes);
}

TEST(DISABLED_Stall, gathers) {
  be_this_process([](Rank& self) {
    const DeviceBuffer memory(self.device, 8);
    (void)ncclAllGather(memory.data() + 4 * self.rank, memory.data(), 1, ncclInt32,
                        self.communicator, self.stream);
    self.synchronize();
  });
}

TEST(Stall, ends_the_rank_itself_and_the_one_that_waits_for_it) {
  EXPECT_EQ(std::vector<int>(2, diagnosis::kHangExitCode),
            as_processes(2, "DISABLED_Stall.gathers",
                         {"WEIGHTSYNC_EMULATOR_HANG_SECONDS=1", "RANK=",
                          "WEIGHTSYNC_EMULATOR_FAULTS=all_gather@rank=1:stall"}));
}

TEST(DISABLED_Stall, is_kept_in_the_call) {
  be_this_process([](Rank& self) {
    const DeviceBuffer memory(self.device, 4);
    std::thread aborting([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      EXPECT_EQ(ncclSuccess, ncclCommAbort(self.communicator));
    });
    EXPECT_EQ(ncclInternalError,
              ncclAllGather(memory.data(), memory.data(), 1, ncclInt32,
                            self.communicator, self.stream));
    aborting.join();
    self.communicator = nullptr;
  });
}

TEST(Stall, of_a_call_ends_with_an_abort_by_another_thread) {
  EXPECT_EQ(std::vector<int>(1, 0),
            as_processes(1, "DISABLED_Stall.is_kept_in_the_call",
                         {"WEIGHTSYNC_EMULATOR_FAULTS=all_gather:block"}));
}

TEST(DISABLED_Stall, fails_behind_the_call) {
  be_this_process([](Rank& self) {
    const DeviceBuffer memory(self.device, 8);
    EXPECT_EQ(ncclSuccess, ncclAllGather(memory.data() + 4 * self.rank, memory.data(),
                                         1, ncclInt32, self.communicator, self.stream));
    ncclResult_t error = ncclSuccess;
    while (self.rank == 1 && error == ncclSuccess) {
      ASSERT_EQ(ncclSuccess, ncclCommGetAsyncError(self.communicator, &error));
    }
    EXPECT_EQ(self.rank == 1 ? ncclRemoteError : ncclSuccess, error);
    EXPECT_EQ(ncclSuccess, ncclCommAbort(self.communicator));
    self.communicator = nullptr;
    self.synchronize();
  });
}

TEST(Stall, of_an_error_is_told_by_the_communicator_and_ends_with_an_abort) {
  EXPECT_EQ(
      std::vector<int>(2, 0),
      as_processes(2, "DISABLED_Stall.fails_behind_the_call",
                   {"RANK=", "WEIGHTSYNC_EMULATOR_FAULTS=all_gather@rank=1:error=6"}));
}

}  // namespace
}  // namespace weightsync::emulator::nccl
