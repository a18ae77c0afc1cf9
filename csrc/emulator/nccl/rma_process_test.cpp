// One-sided operations between processes, and what hangs: nothing but the signals ends
// a wait, and what never ends is reported by every process that takes part.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "emulator/nccl/diagnosis.h"
#include "emulator/nccl/shared_segments.h"
#include "emulator/nccl/window_support.h"

namespace weightsync::emulator::nccl {
namespace {

constexpr std::size_t kWindow = 4096;
const std::string kLimit = "WEIGHTSYNC_EMULATOR_HANG_SECONDS=";
// For ranks that would otherwise sleep, and be killed, for as long as the test may
// last.
constexpr std::chrono::seconds kForever{20};

std::string test_of(const char* name) {
  return std::string("Process.DISABLED_") + name;
}

bool says(const Watched& watched, const std::string& text) {
  return watched.printed.find(text) != std::string::npos;
}

std::size_t times(const Watched& watched, const std::string& text) {
  std::size_t count = 0;
  for (std::size_t at = watched.printed.find(text); at != std::string::npos;
       at = watched.printed.find(text, at + 1)) {
    ++count;
  }
  return count;
}

void be_watched(const std::function<void(Rank&)>& act) {
  print_for_the_watcher();
  be_this_process(act);
}

void exchange_words(const Rank& rank) {
  const TestWindow window(rank, kWindow);
  const int peer = 1 - rank.rank;
  for (std::uint64_t round = 1; round <= 50; ++round) {
    window.word(0) = 2 * round + static_cast<std::uint64_t>(rank.rank);
    EXPECT_EQ(ncclSuccess, put_word(window, rank, peer, 0, 1));
    EXPECT_EQ(ncclSuccess, wait_for(rank, peer, 1));
    rank.synchronize();
    EXPECT_EQ(2 * round + static_cast<std::uint64_t>(peer), window.word(1));
    meet(rank);
  }
}

// Bodies of processes: each is run by a test below, as a program of its own, and not by
// itself. Hence disabled.
TEST(Process, DISABLED_exchanges_words) { be_this_process(exchange_words); }

TEST(OneSidedProcesses, put_to_each_other) {
  EXPECT_EQ(std::vector<int>(2, 0), as_processes(2, test_of("exchanges_words")));
}

TEST(OneSidedProcesses, put_to_each_other_through_a_network) {
  EXPECT_EQ(std::vector<int>(2, 0),
            as_processes(2, test_of("exchanges_words"),
                         {"WEIGHTSYNC_EMULATOR_FAULTS=network=0-1"}));
}

TEST(Process, DISABLED_puts_into_the_middle_of_an_allocation) {
  be_this_process([](Rank& rank) {
    const DeviceBuffer memory(rank.device, kVmmGranularity, Kind::kVmm);
    ncclWindow_t window = nullptr;
    ASSERT_EQ(ncclSuccess,
              ncclCommWindowRegister(rank.communicator, memory.data() + 4096, 4096,
                                     &window, kSymmetric));
    const int peer = 1 - rank.rank;
    memory.data()[4097] = std::byte{1};
    EXPECT_EQ(ncclSuccess,
              ncclPutSignal(memory.data() + 4097, 1, ncclInt8, peer, window, 0, 0, 0, 0,
                            rank.communicator, rank.stream));
    EXPECT_EQ(ncclSuccess, wait_for(rank, peer, 1));
    rank.synchronize();
    const bool forgets = std::getenv("WEIGHTSYNC_EMULATOR_NCCL") == nullptr;
    EXPECT_EQ(std::byte{1}, memory.data()[forgets ? 0 : 4096]);
    EXPECT_EQ(std::byte{0}, memory.data()[forgets ? 4096 : 0]);
    meet(rank);
  });
}

TEST(OneSidedProcesses, before_2_31_2_a_network_forgets_the_offset_of_the_window) {
  const std::string network = "WEIGHTSYNC_EMULATOR_FAULTS=network=0-1";
  const std::string test = test_of("puts_into_the_middle_of_an_allocation");

  EXPECT_EQ(std::vector<int>(2, 0), as_processes(2, test, {network}));
  EXPECT_EQ(std::vector<int>(2, 0),
            as_processes(2, test, {network, "WEIGHTSYNC_EMULATOR_NCCL=2.31.2"}));
}

TEST(Process, DISABLED_registers_as_much_as_its_rank_says) {
  be_this_process([](Rank& rank) {
    const std::size_t bytes = 4096 * (1 + static_cast<std::size_t>(rank.rank));
    const DeviceBuffer memory(rank.device, kVmmGranularity, Kind::kVmm);
    ncclWindow_t window = nullptr;
    const bool refused =
        std::string(std::getenv("WEIGHTSYNC_EMULATOR_NCCL")) == "2.29.7";
    EXPECT_EQ(refused ? ncclInvalidArgument : ncclSuccess,
              ncclCommWindowRegister(rank.communicator, memory.data(), bytes, &window,
                                     kSymmetric));
    meet(rank);
  });
}

TEST(OneSidedProcesses, before_2_30_7_windows_have_one_size) {
  const std::string test = test_of("registers_as_much_as_its_rank_says");

  for (const char* const version : {"2.29.7", "2.30.7", "2.32.3"}) {
    EXPECT_EQ(
        std::vector<int>(2, 0),
        as_processes(2, test, {std::string("WEIGHTSYNC_EMULATOR_NCCL=") + version}))
        << version;
  }
}

TEST(Process, DISABLED_signals_after_the_first_window) {
  be_this_process([](Rank& rank) {
    EXPECT_EQ(ncclInvalidUsage, send_signal(rank, rank.rank));
    EXPECT_EQ(ncclInvalidUsage, wait_for(rank, rank.rank, 1));
    const TestWindow window(rank, kWindow);
    if (rank.rank == 0) {
      // No meeting: rank 1 calls nothing.
      EXPECT_EQ(ncclSuccess, send_signal(rank, 0));
      EXPECT_EQ(ncclSuccess, wait_for(rank, 0, 1));
      rank.synchronize();
    }
  });
}

TEST(OneSidedProcesses, from_2_31_on_the_first_window_is_the_meeting) {
  EXPECT_EQ(std::vector<int>(2, 0),
            as_processes(2, test_of("signals_after_the_first_window"),
                         {"WEIGHTSYNC_EMULATOR_NCCL=2.31.2"}));
}

TEST(Process, DISABLED_uses_the_second_context) {
  be_this_process([](Rank& rank) {
    const TestWindow window(rank, kWindow);
    ncclComm_t comm = rank.communicator;
    EXPECT_EQ(ncclInvalidArgument, ncclSignal(0, 0, 2, 0, comm, rank.stream));
    for (const int context : {1, 0, 1}) {
      EXPECT_EQ(ncclSuccess, ncclSignal(0, 0, context, 0, comm, rank.stream));
    }
    ncclWaitSignalDesc_t both[2] = {{1, 0, 0, 0}, {2, 0, 0, 1}};
    EXPECT_EQ(ncclSuccess, ncclWaitSignal(2, both, comm, rank.stream));
    rank.synchronize();
  });
}

TEST(OneSidedProcesses, from_2_31_on_contexts_count_apart) {
  EXPECT_EQ(std::vector<int>(1, 0),
            as_processes(1, test_of("uses_the_second_context"),
                         {"WEIGHTSYNC_EMULATOR_NCCL=2.31.2", "NCCL_NUM_RMA_CTX=2",
                          kLimit + "10"}));
}

TEST(Process, DISABLED_gets_no_window) {
  be_this_process([](Rank& rank) {
    const DeviceBuffer memory(rank.device, kWindow, Kind::kVmm);
    ncclWindow_t window = reinterpret_cast<ncclWindow_t>(5);
    EXPECT_EQ(ncclSuccess, ncclCommWindowRegister(rank.communicator, memory.data(),
                                                  kWindow, &window, kSymmetric));
    EXPECT_EQ(nullptr, window);
  });
}

TEST(OneSidedProcesses, a_fault_takes_symmetric_support_away) {
  EXPECT_EQ(std::vector<int>(2, 0),
            as_processes(2, test_of("gets_no_window"),
                         {"WEIGHTSYNC_EMULATOR_FAULTS=no-symmetric"}));
}

TEST(Process, DISABLED_gets_no_second_window) {
  be_this_process([](Rank& rank) {
    const TestWindow first(rank, kWindow);
    EXPECT_NE(nullptr, first.handle());
    const DeviceBuffer memory(rank.device, kWindow, Kind::kVmm);
    ncclWindow_t window = reinterpret_cast<ncclWindow_t>(5);
    EXPECT_EQ(ncclSuccess, ncclCommWindowRegister(rank.communicator, memory.data(),
                                                  kWindow, &window, kSymmetric));
    EXPECT_EQ(nullptr, window);
    const TestWindow third(rank, kWindow);
    EXPECT_NE(nullptr, third.handle());
  });
}

TEST(OneSidedProcesses, a_fault_leaves_one_window_out) {
  EXPECT_EQ(std::vector<int>(2, 0),
            as_processes(2, test_of("gets_no_second_window"),
                         {"WEIGHTSYNC_EMULATOR_FAULTS=window_register@n=2:null"}));
}

TEST(Process, DISABLED_puts_three_times) {
  be_this_process([](Rank& rank) {
    const TestWindow window(rank, kWindow);
    if (rank.rank == 0) {
      for (std::size_t k = 1; k <= 3; ++k) {
        window.word(0) = k;
        (void)put_word(window, rank, 1, 0, k);
        rank.synchronize();
      }
    }
    EXPECT_EQ(ncclSuccess, send_signal(rank, rank.rank));  // the meeting
    EXPECT_EQ(ncclSuccess, wait_for(rank, 0, 2));
    rank.synchronize();
    EXPECT_EQ(1U, window.word(1));
    EXPECT_EQ(2U, window.word(2));
    EXPECT_EQ(0U, window.word(3));
    ncclResult_t error = ncclInternalError;
    EXPECT_EQ(ncclSuccess, ncclCommGetAsyncError(rank.communicator, &error));
    EXPECT_EQ(ncclSuccess, error);  // a dead peer raises nothing
    // Its memory lives as long as this window: a put still works.
    EXPECT_EQ(ncclSuccess, put_word(window, rank, 0, 1, 4));
    rank.synchronize();
    ::_exit(::testing::Test::HasFailure() ? 1 : 0);
  });
}

TEST(OneSidedProcesses, a_rank_killed_at_its_third_put_has_made_two) {
  EXPECT_EQ((std::vector<int>{-SIGKILL, 0}),
            as_processes(2, test_of("puts_three_times"),
                         {"WEIGHTSYNC_EMULATOR_FAULTS=put@rank=0,n=3:kill", "RANK="}));
}

// --- what hangs ---

TEST(Process, DISABLED_waits_before_it_puts) {
  be_watched([](Rank& rank) {
    const TestWindow window(rank, kWindow);
    meet(rank);
    const OwnStream other;
    EXPECT_EQ(ncclSuccess, wait_for(rank, 1 - rank.rank, 1));
    EXPECT_EQ(ncclSuccess, put_word(window, rank, 1 - rank.rank, 0, 1, other.get()));
    rank.synchronize();
  });
}

TEST(OneSidedHangs, waiting_before_putting_on_both_sides_is_reported_by_both) {
  const Watched watched =
      watch_processes(2, test_of("waits_before_it_puts"), {kLimit + "1"});

  EXPECT_EQ(std::vector<int>(2, diagnosis::kHangExitCode), watched.codes);
  EXPECT_EQ(2U, times(watched, "nothing moves since"));
  for (const std::string rank : {"0", "1"}) {
    const std::string peer = rank == "0" ? "1" : "0";
    EXPECT_TRUE(says(watched, "rank " + rank + " of 2 (communicator"));
    EXPECT_TRUE(says(watched, "for signal 2 of rank " + peer + " (1 arrived)"));
  }
  EXPECT_TRUE(says(watched, "behind it: ncclPutSignal of 8 bytes to rank 1"));
  EXPECT_TRUE(says(watched, "called from"));
  EXPECT_TRUE(says(watched, "is blocked in ncclWaitSignal"));
}

// A wait that nobody satisfies, and then this.
void waits_and(const char* what, ncclResult_t (*end)(ncclComm_t)) {
  be_watched([&](Rank& rank) {
    meet(rank);
    if (rank.rank == 1) {
      std::this_thread::sleep_for(kForever);
      return;
    }
    EXPECT_EQ(ncclSuccess, wait_for(rank, 1, 1));
    (void)end(rank.communicator);
    fprintf(stderr, "%s has returned\n", what);
  });
}

TEST(Process, DISABLED_waits_and_aborts) { waits_and("abort", ncclCommAbort); }
TEST(Process, DISABLED_waits_and_destroys) { waits_and("destroy", ncclCommDestroy); }
TEST(Process, DISABLED_waits_and_finalizes) { waits_and("finalize", ncclCommFinalize); }
TEST(Process, DISABLED_waits_and_revokes) {
  waits_and("revoke", [](ncclComm_t comm) { return ncclCommRevoke(comm, 0); });
}
TEST(Process, DISABLED_waits_and_shrinks) {
  waits_and("shrink", [](ncclComm_t comm) {
    int excluded = 1;
    ncclComm_t child = nullptr;
    return ncclCommShrink(comm, &excluded, 1, &child, nullptr, kNcclShrinkAbort);
  });
}

class NothingEndsAWait : public ::testing::TestWithParam<const char*> {};

TEST_P(NothingEndsAWait, the_call_hangs_and_is_reported) {
  const std::string name = std::string("waits_and_") + GetParam();
  const Watched watched =
      watch_processes(2, test_of(name.c_str()), {kLimit + "1"}, Ends::kWithRank0);

  EXPECT_EQ((std::vector<int>{diagnosis::kHangExitCode, -SIGKILL}), watched.codes);
  EXPECT_FALSE(says(watched, "has returned"));
  EXPECT_TRUE(says(watched, "for signal 2 of rank 1 (1 arrived)")) << watched.printed;
  EXPECT_TRUE(says(watched, "waits for its operations to end")) << watched.printed;
}

INSTANTIATE_TEST_SUITE_P(OneSidedHangs, NothingEndsAWait,
                         ::testing::Values("aborts", "destroys", "finalizes", "revokes",
                                           "shrinks"),
                         [](const auto& each) { return std::string(each.param); });

// Rank 1 dies; rank 0 returns when it has.
void let_rank_1_die(const Rank& rank, const TestWindow& window) {
  window.word(0) = static_cast<std::uint64_t>(::getpid());
  meet(rank);
  if (rank.rank == 1) {
    EXPECT_EQ(ncclSuccess, put_word(window, rank, 0, 0, 1));
    rank.synchronize();
    ::kill(::getpid(), SIGKILL);
  }
  EXPECT_EQ(ncclSuccess, wait_for(rank, 1, 1));
  rank.synchronize();
  const auto peer = static_cast<std::int64_t>(window.word(1));
  while (!is_process_gone(peer)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

TEST(Process, DISABLED_waits_for_a_dead_rank) {
  be_watched([](Rank& rank) {
    const TestWindow window(rank, kWindow);
    let_rank_1_die(rank, window);
    EXPECT_EQ(ncclSuccess, wait_for(rank, 1, 1));
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    ncclResult_t error = ncclInternalError;
    EXPECT_EQ(ncclSuccess, ncclCommGetAsyncError(rank.communicator, &error));
    if (error != ncclSuccess) ::_exit(4);
    rank.synchronize();
  });
}

TEST(OneSidedHangs, a_wait_for_a_dead_rank_raises_nothing_and_is_reported) {
  const Watched watched =
      watch_processes(2, test_of("waits_for_a_dead_rank"), {kLimit + "1"});

  EXPECT_EQ((std::vector<int>{diagnosis::kHangExitCode, -SIGKILL}), watched.codes);
  EXPECT_TRUE(says(watched, " is dead"));
}

TEST(Process, DISABLED_puts_to_a_dead_rank) {
  be_watched([](Rank& rank) {
    const TestWindow window(rank, kWindow);
    let_rank_1_die(rank, window);
    EXPECT_EQ(ncclSuccess, put_word(window, rank, 1, 0, 1));
    rank.synchronize();
    ::_exit(5);
  });
}

TEST(OneSidedHangs, a_put_to_a_dead_rank_never_completes_through_a_network) {
  const Watched watched =
      watch_processes(2, test_of("puts_to_a_dead_rank"),
                      {kLimit + "1", "WEIGHTSYNC_EMULATOR_FAULTS=network=*"});

  EXPECT_EQ((std::vector<int>{diagnosis::kHangExitCode, -SIGKILL}), watched.codes);
  EXPECT_TRUE(says(watched, "for the network to complete 1 of 1 puts"));
}

TEST(OneSidedHangs, a_put_to_a_dead_rank_completes_without_one) {
  const Watched watched =
      watch_processes(2, test_of("puts_to_a_dead_rank"), {kLimit + "1"});

  EXPECT_EQ((std::vector<int>{5, -SIGKILL}), watched.codes);
}

TEST(Process, DISABLED_only_rank_0_signals) {
  be_watched([](Rank& rank) {
    if (rank.rank == 0) (void)send_signal(rank, 0);
    if (rank.rank == 1) std::this_thread::sleep_for(kForever);
    ::_exit(0);
  });
}

TEST(OneSidedHangs, a_first_call_of_some_ranks_only_is_reported) {
  const Watched watched = watch_processes(2, test_of("only_rank_0_signals"),
                                          {kLimit + "1"}, Ends::kWithRank0);

  EXPECT_EQ((std::vector<int>{diagnosis::kHangExitCode, -SIGKILL}), watched.codes);
  EXPECT_TRUE(says(watched, "in ncclSignal"));
  EXPECT_TRUE(says(watched, "the first one-sided call, which every rank has to make"));
  EXPECT_TRUE(says(watched, "rank 1 (process"));
}

TEST(Process, DISABLED_puts_beyond_the_allocation) {
  be_watched([](Rank& rank) {
    const TestWindow window(rank, kVmmGranularity);
    EXPECT_EQ(ncclSuccess, ncclPutSignal(window.data(), 2, ncclInt8, 0, window.handle(),
                                         kVmmGranularity - 1, 0, 0, 0,
                                         rank.communicator, rank.stream));
    rank.synchronize();
    ncclResult_t error = ncclInternalError;
    EXPECT_EQ(ncclSuccess, ncclCommGetAsyncError(rank.communicator, &error));
    EXPECT_EQ(ncclSuccess, error);
    ::_exit(::testing::Test::HasFailure() ? 1 : 0);
  });
}

TEST(OneSidedProcesses, a_put_beyond_the_allocation_is_a_fault_of_the_device) {
  const Watched watched = watch_processes(1, test_of("puts_beyond_the_allocation"), {});

  EXPECT_EQ(std::vector<int>(1, 0), watched.codes);
  EXPECT_TRUE(says(watched, "its target lies at 2097151 of the allocation"));
}

}  // namespace
}  // namespace weightsync::emulator::nccl
