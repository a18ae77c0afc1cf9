// ncclPutSignal, ncclSignal and ncclWaitSignal through the C ABI: order, counting and
// blocking, among ranks that are threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "emulator/nccl/window_support.h"
#include "shm/test_support.h"

namespace weightsync::emulator::nccl {
namespace {

using std::chrono::milliseconds;

constexpr std::size_t kWindow = 4096;

TEST(OneSided, whoever_is_woken_by_signal_k_sees_the_data_of_puts_1_to_k) {
  as_threads(2, [](const Rank& rank) {
    const TestWindow window(rank, kWindow);
    for (std::size_t k = 0; k < 50; ++k) {
      if (rank.rank == 0) {
        window.word(k) = k + 1;
        EXPECT_EQ(ncclSuccess, put_word(window, rank, 1, k, 100 + k));
        continue;
      }
      EXPECT_EQ(ncclSuccess, wait_for(rank, 0, 1));
      rank.synchronize();
      for (std::size_t earlier = 0; earlier <= k; ++earlier) {
        EXPECT_EQ(earlier + 1, window.word(100 + earlier));
      }
    }
    meet(rank);
  });
}

TEST(OneSided, signals_add_up_in_any_portion_and_surplus_ones_are_kept) {
  Steps steps;
  as_threads(2, [&](const Rank& rank) {
    const TestWindow window(rank, kWindow);
    if (rank.rank == 0) {
      for (int i = 0; i < 4; ++i)
        EXPECT_EQ(ncclSuccess, put_word(window, rank, 1, 0, 1));
      for (int i = 0; i < 3; ++i) EXPECT_EQ(ncclSuccess, send_signal(rank, 1));
      steps.await(1);
      EXPECT_EQ(ncclSuccess, send_signal(rank, 1));
    } else {
      EXPECT_EQ(ncclSuccess, wait_for(rank, 0, 1));
      EXPECT_EQ(ncclSuccess, wait_for(rank, 0, 3));
      std::vector<ncclWaitSignalDesc_t> twice{{1, 0, 0, 0}, {2, 0, 0, 0}};
      EXPECT_EQ(ncclSuccess,
                ncclWaitSignal(2, twice.data(), rank.communicator, rank.stream));
      twice.assign(2, {1000, 0, 0, 0});  // was copied
      rank.synchronize();
      const OwnStream eighth;
      EXPECT_EQ(ncclSuccess, wait_for(rank, 0, 1, eighth.get()));
      EXPECT_TRUE(stays_busy(eighth));
      steps.reach(1);
      eighth.synchronize();
    }
    meet(rank);
  });
}

TEST(OneSided, counters_belong_to_the_communicator_not_to_a_window) {
  as_threads(2, [](const Rank& rank) {
    const TestWindow first(rank, kWindow);
    const TestWindow second(rank, kWindow);
    if (rank.rank == 0) {
      EXPECT_EQ(ncclSuccess, put_word(first, rank, 1, 0, 1));
      EXPECT_EQ(ncclSuccess, put_word(second, rank, 1, 0, 1));
    } else {
      EXPECT_EQ(ncclSuccess, wait_for(rank, 0, 2));
      rank.synchronize();
    }
    meet(rank);
  });
}

TEST(OneSided, a_new_communicator_counts_from_zero_and_blocks_no_other) {
  Steps steps;
  as_threads(2, [&](const Rank& rank) {
    const int peer = 1 - rank.rank;
    EXPECT_EQ(ncclSuccess, send_signal(rank, peer));  // surplus, in the parent
    Rank child = rank;
    ASSERT_EQ(ncclSuccess, ncclCommSplit(rank.communicator, 0, rank.rank,
                                         &child.communicator, nullptr));
    meet(child);
    if (rank.rank == 1) {
      const OwnStream stream;
      EXPECT_EQ(ncclSuccess, wait_for(child, peer, 1, stream.get()));
      EXPECT_TRUE(stays_busy(stream));
      EXPECT_EQ(ncclSuccess, wait_for(rank, peer, 1));
      rank.synchronize();  // the parent goes on
      EXPECT_FALSE(stream.is_idle());
      steps.reach(1);
      stream.synchronize();
    } else {
      steps.await(1);
      EXPECT_EQ(ncclSuccess, send_signal(child, peer));
      EXPECT_EQ(ncclSuccess, wait_for(rank, peer, 1));
      child.synchronize();
    }
    EXPECT_EQ(ncclSuccess, ncclCommDestroy(child.communicator));
    meet(rank);
  });
}

TEST(OneSided, a_rank_may_put_to_itself_and_put_nothing) {
  as_threads(1, [](const Rank& rank) {
    const TestWindow window(rank, kWindow);
    window.word(0) = 5;
    EXPECT_EQ(ncclSuccess, put_word(window, rank, 0, 0, 1));
    // No data: its offset does not matter, its source does.
    EXPECT_EQ(ncclSuccess,
              ncclPutSignal(window.data(), 0, ncclFloat, 0, window.handle(), 1 << 30, 0,
                            0, 0, rank.communicator, rank.stream));
    EXPECT_EQ(ncclInvalidArgument,
              ncclPutSignal(nullptr, 0, ncclFloat, 0, window.handle(), 0, 0, 0, 0,
                            rank.communicator, rank.stream));
    EXPECT_EQ(ncclSuccess, wait_for(rank, 0, 2));
    rank.synchronize();

    EXPECT_EQ(5U, window.word(1));
  });
}

TEST(OneSided, only_the_bytes_of_count_times_the_type_move) {
  as_threads(1, [](const Rank& rank) {
    const TestWindow window(rank, kWindow);
    std::memset(window.data(), 1, 16);
    // At an offset in bytes that is aligned to nothing.
    EXPECT_EQ(ncclSuccess,
              ncclPutSignal(window.data(), 3, ncclBfloat16, 0, window.handle(), 101, 0,
                            0, 0, rank.communicator, rank.stream));
    EXPECT_EQ(ncclSuccess, wait_for(rank, 0, 1));
    rank.synchronize();

    EXPECT_EQ(std::byte{0}, window.data()[100]);
    EXPECT_EQ(std::byte{1}, window.data()[101]);
    EXPECT_EQ(std::byte{1}, window.data()[106]);
    EXPECT_EQ(std::byte{0}, window.data()[107]);
  });
}

TEST(OneSided, a_put_in_pieces_is_one_signal) {
  const Setting piece("WEIGHTSYNC_EMULATOR_PUT_PIECE", "100");
  Steps steps;
  as_threads(2, [&](const Rank& rank) {
    const TestWindow window(rank, kWindow);
    if (rank.rank == 0) {
      std::memset(window.data(), 3, 1050);
      EXPECT_EQ(ncclSuccess,
                ncclPutSignal(window.data(), 1050, ncclInt8, 1, window.handle(), 2000,
                              0, 0, 0, rank.communicator, rank.stream));
      steps.await(1);
      EXPECT_EQ(ncclSuccess, send_signal(rank, 1));
    } else {
      EXPECT_EQ(ncclSuccess, wait_for(rank, 0, 1));
      rank.synchronize();
      EXPECT_EQ(std::byte{3}, window.data()[2000 + 1049]);
      EXPECT_EQ(std::byte{0}, window.data()[2000 + 1050]);
      const OwnStream second;
      EXPECT_EQ(ncclSuccess, wait_for(rank, 0, 1, second.get()));
      EXPECT_TRUE(stays_busy(second));
      steps.reach(1);
      second.synchronize();
    }
    meet(rank);
  });
}

TEST(OneSided, calls_only_enqueue_and_data_is_read_when_the_put_runs) {
  as_threads(2, [](const Rank& rank) {
    const TestWindow window(rank, kWindow);
    meet(rank);
    if (rank.rank == 0) {
      OwnStream stream;
      stream.hold();
      window.word(0) = 1;
      EXPECT_EQ(ncclSuccess, put_word(window, rank, 1, 0, 1, stream.get()));
      EXPECT_TRUE(stays_busy(stream));
      window.word(0) = 2;
      stream.release();
      stream.synchronize();
    } else {
      EXPECT_EQ(ncclSuccess, wait_for(rank, 0, 1));
      rank.synchronize();
      EXPECT_EQ(2U, window.word(1));
    }
    meet(rank);
  });
}

TEST(OneSided, a_pending_wait_blocks_the_communicator_on_every_stream) {
  Steps steps;
  as_threads(2, [&](const Rank& rank) {
    meet(rank);
    if (rank.rank == 1) {
      const OwnStream waiting;
      const OwnStream other;
      EXPECT_EQ(ncclSuccess, wait_for(rank, 0, 1, waiting.get()));
      EXPECT_EQ(ncclSuccess, send_signal(rank, 1, other.get()));
      EXPECT_TRUE(stays_busy(other));
      steps.reach(1);
      other.synchronize();
      // It ended before the other began, but its stream may take a moment to say so.
      EXPECT_TRUE(shm::becomes_true([&] { return waiting.is_idle(); }));
      EXPECT_EQ(ncclSuccess, wait_for(rank, 1, 1));
    } else {
      steps.await(1);
      EXPECT_EQ(ncclSuccess, send_signal(rank, 1));
    }
    meet(rank);
  });
}

TEST(OneSided, the_first_call_is_a_meeting_of_all_ranks) {
  Steps steps;
  std::atomic<bool> returned{false};
  as_threads(2, [&](const Rank& rank) {
    if (rank.rank == 0) {
      EXPECT_EQ(ncclSuccess, send_signal(rank, 0));
      returned = true;
      EXPECT_EQ(ncclSuccess, send_signal(rank, 1));  // no meeting any more
      rank.synchronize();
      steps.reach(1);
    } else {
      std::this_thread::sleep_for(milliseconds(50));
      EXPECT_FALSE(returned);
      EXPECT_EQ(ncclSuccess, send_signal(rank, 1));
      steps.await(1);
    }
  });

  EXPECT_TRUE(returned);
}

TEST(OneSided, a_peer_that_frees_its_memory_too_early_disturbs_nobody) {
  Steps steps;
  as_threads(2, [&](const Rank& rank) {
    if (rank.rank == 1) {
      {
        const TestWindow window(rank, kWindow);
      }
      steps.reach(1);
      EXPECT_EQ(ncclSuccess, wait_for(rank, 0, 1));
      rank.synchronize();
    } else {
      const TestWindow window(rank, kWindow);
      steps.await(1);
      EXPECT_EQ(ncclSuccess, put_word(window, rank, 1, 0, 1));
      rank.synchronize();
    }
  });
}

void put_to_all(const Rank& rank, std::size_t rounds) {
  const TestWindow window(rank, kWindow);
  for (std::size_t round = 1; round <= rounds; ++round) {
    window.word(0) = round * 100 + static_cast<std::size_t>(rank.rank);
    ncclGroupStart();
    for (int peer = 0; peer < rank.size; ++peer) {
      EXPECT_EQ(ncclSuccess, put_word(window, rank, peer, 0,
                                      1 + static_cast<std::size_t>(rank.rank)));
    }
    EXPECT_EQ(ncclSuccess, ncclGroupEnd());
    for (int peer = 0; peer < rank.size; ++peer) {
      EXPECT_EQ(ncclSuccess, wait_for(rank, peer, 1));
    }
    rank.synchronize();
    for (std::size_t peer = 0; peer < static_cast<std::size_t>(rank.size); ++peer) {
      EXPECT_EQ(round * 100 + peer, window.word(1 + peer));
    }
    meet(rank);
  }
}

TEST(OneSided, all_ranks_may_put_to_all_at_once) {
  as_threads(4, [](const Rank& rank) { put_to_all(rank, 20); });
}

// Two on each device.
TEST(OneSided, sixteen_ranks_may_put_to_all_at_once) {
  const Setting shared("NCCL_MULTI_RANK_GPU_ENABLE", "1");
  as_threads(16, [](const Rank& rank) { put_to_all(rank, 2); });
}

// Prints times, which depend on what else runs: run it by hand.
TEST(OneSided, DISABLED_a_large_put_is_about_as_fast_as_memcpy) {
  as_threads(2, [](const Rank& rank) {
    constexpr std::size_t kBytes = std::size_t{64} << 20;
    constexpr int kTimes = 10;
    const TestWindow window(rank, 2 * kBytes);
    std::memset(window.data(), rank.rank, 2 * kBytes);
    meet(rank);
    if (rank.rank == 0) {
      const auto time = [&](const char* what, const std::function<void()>& act) {
        double best = 1e9;
        for (int i = 0; i < kTimes; ++i) {
          const auto start = std::chrono::steady_clock::now();
          act();
          const std::chrono::duration<double> took =
              std::chrono::steady_clock::now() - start;
          best = std::min(best, took.count());
        }
        printf("%s: %.2f GB/s\n", what, kBytes / best / 1e9);
      };
      time("memcpy",
           [&] { std::memcpy(window.data() + kBytes, window.data(), kBytes); });
      time("put", [&] {
        EXPECT_EQ(ncclSuccess,
                  ncclPutSignal(window.data(), kBytes, ncclInt8, 1, window.handle(), 0,
                                0, 0, 0, rank.communicator, rank.stream));
        rank.synchronize();
      });
    } else {
      EXPECT_EQ(ncclSuccess, wait_for(rank, 0, kTimes));
    }
    meet(rank);
  });
}

}  // namespace
}  // namespace weightsync::emulator::nccl
