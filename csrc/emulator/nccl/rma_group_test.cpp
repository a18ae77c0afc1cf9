// One-sided calls in groups, through the C ABI: what is fused, in which order it runs,
// and what a failure drops.
#include <gtest/gtest.h>

#include <cstdint>

#include "emulator/nccl/window_support.h"

namespace weightsync::emulator::nccl {
namespace {

constexpr std::size_t kWindow = 4096;

TEST(OneSidedGroups, puts_to_one_peer_land_in_their_order) {
  as_threads(2, [](const Rank& rank) {
    const TestWindow window(rank, kWindow);
    if (rank.rank == 0) {
      for (std::size_t k = 0; k < 100; ++k) window.word(k) = k;
      ncclGroupStart();
      for (std::size_t k = 0; k < 100; ++k) {
        EXPECT_EQ(ncclSuccess, put_word(window, rank, 1, k, 200));
      }
      EXPECT_EQ(ncclSuccess, ncclGroupEnd());
    } else {
      EXPECT_EQ(ncclSuccess, wait_for(rank, 0, 100));
      rank.synchronize();
      EXPECT_EQ(99U, window.word(200));
    }
    meet(rank);
  });
}

TEST(OneSidedGroups, in_a_group_puts_before_a_wait_run_before_it) {
  as_threads(2, [](const Rank& rank) {
    const TestWindow window(rank, kWindow);
    const int peer = 1 - rank.rank;
    window.word(0) = static_cast<std::uint64_t>(rank.rank) + 10;
    ncclGroupStart();
    EXPECT_EQ(ncclSuccess, put_word(window, rank, peer, 0, 1));
    EXPECT_EQ(ncclSuccess, wait_for(rank, peer, 1));
    EXPECT_EQ(ncclSuccess, ncclGroupEnd());
    rank.synchronize();
    EXPECT_EQ(static_cast<std::uint64_t>(peer) + 10, window.word(1));
    meet(rank);
  });
}

TEST(OneSidedGroups, in_a_group_they_run_before_collectives) {
  as_threads(2, [](const Rank& rank) {
    const TestWindow window(rank, kWindow);
    // Rank 1 comes to the collective only when it has the signal.
    EXPECT_EQ(ncclSuccess, rank.rank == 0 ? ncclGroupStart() : wait_for(rank, 0, 1));
    EXPECT_EQ(ncclSuccess, ncclAllReduce(window.data(), window.data(), 1, ncclUint64,
                                         ncclSum, rank.communicator, rank.stream));
    if (rank.rank == 0) {
      EXPECT_EQ(ncclSuccess, send_signal(rank, 1));
      EXPECT_EQ(ncclSuccess, ncclGroupEnd());
    }
    rank.synchronize();
    meet(rank);
  });
}

TEST(OneSidedGroups, a_failure_in_a_group_drops_it_and_is_told_twice) {
  Steps steps;
  as_threads(2, [&](const Rank& rank) {
    meet(rank);
    if (rank.rank == 0) {
      ncclGroupStart();
      EXPECT_EQ(ncclSuccess, send_signal(rank, 1));
      EXPECT_EQ(ncclInvalidArgument, send_signal(rank, 9));
      EXPECT_EQ(ncclInvalidArgument, ncclGroupEnd());
      steps.await(1);
      EXPECT_EQ(ncclSuccess, send_signal(rank, 1));
    } else {
      const OwnStream stream;
      EXPECT_EQ(ncclSuccess, wait_for(rank, 0, 1, stream.get()));
      EXPECT_TRUE(stays_busy(stream));
      steps.reach(1);
      stream.synchronize();
    }
    meet(rank);
  });
}

TEST(OneSidedGroups, a_put_refused_at_launch_makes_the_next_signal_count_twice) {
  as_threads(2, [](const Rank& rank) {
    const TestWindow window(rank, kWindow);
    meet(rank);
    if (rank.rank == 0) {
      EXPECT_EQ(ncclInvalidArgument,
                ncclPutSignal(window.data(), 1, ncclInt8, 1, window.handle(), kWindow,
                              0, 0, 0, rank.communicator, rank.stream));
      EXPECT_EQ(ncclSuccess, send_signal(rank, 1));
    } else {
      EXPECT_EQ(ncclSuccess, wait_for(rank, 0, 2));
      rank.synchronize();
    }
    // The counters are apart now: rank 1 has to ask for one less, as nothing is owed.
    EXPECT_EQ(ncclSuccess, ncclAllReduce(window.data(), window.data(), 1, ncclInt8,
                                         ncclSum, rank.communicator, rank.stream));
    rank.synchronize();
  });
}

}  // namespace
}  // namespace weightsync::emulator::nccl
