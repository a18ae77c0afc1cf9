// Split, shrink and grow.
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "emulator/nccl/config_support.h"
#include "emulator/nccl/rank_support.h"
#include "emulator/nccl/window_support.h"

namespace weightsync::emulator::nccl {
namespace {

int rank_of(ncclComm_t communicator) {
  int rank = -1;
  EXPECT_EQ(ncclSuccess, ncclCommUserRank(communicator, &rank));
  return rank;
}

int size_of(ncclComm_t communicator) {
  int size = -1;
  EXPECT_EQ(ncclSuccess, ncclCommCount(communicator, &size));
  return size;
}

// Whether the ranks really reach each other: the sum of one from each.
void expect_works(ncclComm_t communicator, const Rank& self) {
  const DeviceBuffer buffer(self.device, sizeof(int));
  int value = 1;
  std::memcpy(buffer.data(), &value, sizeof value);
  EXPECT_EQ(ncclSuccess, ncclAllReduce(buffer.data(), buffer.data(), 1, ncclInt32,
                                       ncclSum, communicator, self.stream));
  self.synchronize();
  std::memcpy(&value, buffer.data(), sizeof value);
  EXPECT_EQ(size_of(communicator), value);
}

TEST(SplitTest, RanksOfOneColorAreTogetherInTheOrderOfTheirKeys) {
  as_threads(4, [](Rank& self) {
    ncclComm_t child = nullptr;
    const ncclResult_t code =
        ncclCommSplit(self.communicator, self.rank % 2, -self.rank, &child, nullptr);

    EXPECT_EQ(ncclSuccess, code);
    EXPECT_EQ(2, size_of(child));
    EXPECT_EQ(self.rank < 2 ? 1 : 0, rank_of(child));
    expect_works(child, self);
    expect_works(self.communicator, self);
    EXPECT_EQ(ncclSuccess, ncclCommDestroy(child));
  });
}

TEST(SplitTest, ARankWithoutColorGetsNothing) {
  as_threads(3, [](Rank& self) {
    ncclComm_t child = self.communicator;
    const int color = self.rank == 1 ? kNcclSplitNoColor : 5;
    EXPECT_EQ(ncclSuccess, ncclCommSplit(self.communicator, color, 0, &child, nullptr));

    if (self.rank == 1) {
      EXPECT_EQ(nullptr, child);
    } else {
      EXPECT_EQ(self.rank / 2, rank_of(child));
      expect_works(child, self);
      EXPECT_EQ(ncclSuccess, ncclCommDestroy(child));
    }
  });
}

TEST(SplitTest, ArgumentsAreChecked) {
  as_threads(1, [](Rank& self) {
    ncclComm_t child = nullptr;

    EXPECT_EQ(ncclInvalidArgument, ncclCommSplit(nullptr, 0, 0, &child, nullptr));
    EXPECT_EQ(ncclInvalidArgument,
              ncclCommSplit(self.communicator, 0, 0, nullptr, nullptr));
    EXPECT_EQ(ncclInvalidArgument,
              ncclCommSplit(self.communicator, -2, 0, &child, nullptr));
  });
}

TEST(SplitTest, ANonblockingParentGivesTheChildWhenItIsPolled) {
  as_threads(2, [](Rank& self) {
    const ncclConfig_t config = nonblocking_config();
    ncclComm_t parent = nullptr;
    ncclConfig_t copy = config;
    EXPECT_EQ(ncclSuccess, ncclCommSplit(self.communicator, 0, 0, &parent, &copy));
    ncclComm_t child = nullptr;
    EXPECT_EQ(ncclSuccess, ncclCommSplit(parent, 0, self.rank, &child, nullptr));
    EXPECT_EQ(ncclSuccess, poll(parent));

    EXPECT_NE(nullptr, child);
    EXPECT_EQ(2, size_of(child));
    EXPECT_EQ(ncclSuccess, ncclCommDestroy(child));
    EXPECT_EQ(ncclSuccess, ncclCommDestroy(parent));
  });
}

TEST(SplitTest, APeerThatLeavesInsteadIsARemoteError) {
  as_threads(2, [](Rank& self) {
    if (self.rank == 1) return;
    ncclComm_t child = nullptr;

    EXPECT_EQ(ncclRemoteError, ncclCommSplit(self.communicator, 0, 0, &child, nullptr));
    EXPECT_EQ(nullptr, child);
  });
}

TEST(ShrinkTest, SurvivorsCloseTheGapsAndTheListIsSorted) {
  as_threads(4, [](Rank& self) {
    int excluded[2] = {2, 0};
    ncclComm_t child = nullptr;
    if (self.rank == 0 || self.rank == 2) return;
    EXPECT_EQ(ncclSuccess, ncclCommShrink(self.communicator, excluded, 2, &child,
                                          nullptr, kNcclShrinkDefault));

    EXPECT_EQ(0, excluded[0]);
    EXPECT_EQ(2, excluded[1]);
    EXPECT_EQ(2, size_of(child));
    EXPECT_EQ(self.rank / 2, rank_of(child));
    expect_works(child, self);
    EXPECT_EQ(ncclSuccess, ncclCommDestroy(child));
  });
}

TEST(ShrinkTest, ArgumentsAreChecked) {
  as_threads(1, [](Rank& self) {
    int itself[1] = {0};
    ncclComm_t child = nullptr;

    EXPECT_EQ(ncclInvalidArgument,
              ncclCommShrink(self.communicator, nullptr, 1, &child, nullptr, 0));
    EXPECT_EQ(ncclInvalidArgument,
              ncclCommShrink(self.communicator, itself, 0, &child, nullptr, 0));
    EXPECT_EQ(ncclInvalidArgument,
              ncclCommShrink(self.communicator, itself, 1, &child, nullptr, 0));
    EXPECT_EQ(ncclInvalidArgument,
              ncclCommShrink(nullptr, itself, 1, &child, nullptr, 0));
  });
}

TEST(ShrinkTest, RanksThatAreNoneOrTwiceInTheListAndUnknownFlagsAreIgnored) {
  as_threads(2, [](Rank& self) {
    int excluded[] = {99, 1, 1, -5};
    ncclComm_t child = nullptr;
    if (self.rank == 1) return;
    EXPECT_EQ(ncclSuccess,
              ncclCommShrink(self.communicator, excluded, 4, &child, nullptr, 2));

    EXPECT_EQ(1, size_of(child));
    EXPECT_EQ(2, size_of(self.communicator));  // which is still there
    EXPECT_EQ(ncclSuccess, ncclCommDestroy(child));
  });
}

TEST(ShrinkTest, AnAbortingShrinkEndsWhatWaitsForTheExcludedRank) {
  as_threads(3, [](Rank& self) {
    if (self.rank == 1) return;  // never comes
    const DeviceBuffer buffer(self.device, 64);
    EXPECT_EQ(ncclSuccess, ncclAllReduce(buffer.data(), buffer.data(), 4, ncclInt32,
                                         ncclSum, self.communicator, self.stream));
    int excluded[1] = {1};
    ncclComm_t child = nullptr;
    EXPECT_EQ(ncclSuccess, ncclCommShrink(self.communicator, excluded, 1, &child,
                                          nullptr, kNcclShrinkAbort));

    expect_works(child, self);
    EXPECT_EQ(ncclSuccess, ncclCommDestroy(child));
  });
}

TEST(ShrinkTest, ARevokedCommunicatorShrinksAndTheChildWorks) {
  as_threads(3, [](Rank& self) {
    EXPECT_EQ(ncclSuccess, ncclCommRevoke(self.communicator, 0));
    if (self.rank == 2) return;
    int excluded[1] = {2};
    ncclComm_t child = nullptr;
    EXPECT_EQ(ncclSuccess,
              ncclCommShrink(self.communicator, excluded, 1, &child, nullptr, 0));

    expect_works(child, self);
    EXPECT_EQ(ncclSuccess, ncclCommDestroy(child));
  });
}

TEST(SplitTest, ARevokedCommunicatorSplitsAndTheChildWorks) {
  as_threads(2, [](Rank& self) {
    ncclComm_t child = nullptr;
    EXPECT_EQ(ncclSuccess, ncclCommRevoke(self.communicator, 0));
    EXPECT_EQ(ncclSuccess, ncclCommSplit(self.communicator, 0, 0, &child, nullptr));

    expect_works(child, self);
    EXPECT_EQ(ncclSuccess, ncclCommDestroy(child));
  });
}

// Three old ranks and two new ones; `root` calls ncclCommGetUniqueId.
void grow(int root) {
  std::atomic<bool> made{false};
  ncclUniqueId id{};
  const auto await_id = [&] {
    while (!made) std::this_thread::yield();
  };
  std::vector<std::thread> joiners;
  for (int rank = 3; rank < 5; ++rank) {
    joiners.emplace_back([&, rank] {
      await_id();
      ASSERT_TRUE(set_current_device(rank).ok());
      Rank self;
      self.device = rank;
      EXPECT_EQ(ncclSuccess,
                ncclCommGrow(nullptr, 5, &id, rank, &self.communicator, nullptr));
      EXPECT_EQ(rank, rank_of(self.communicator));
      expect_works(self.communicator, self);
      EXPECT_EQ(ncclSuccess, ncclCommDestroy(self.communicator));
    });
  }
  as_threads(3, [&](Rank& self) {
    if (self.rank == root) {
      EXPECT_EQ(ncclSuccess, ncclCommGetUniqueId(self.communicator, &id));
      made = true;
    }
    ncclComm_t grown = nullptr;
    EXPECT_EQ(ncclSuccess,
              ncclCommGrow(self.communicator, 5, self.rank == root ? &id : nullptr, -1,
                           &grown, nullptr));
    EXPECT_EQ(self.rank, rank_of(grown));
    EXPECT_EQ(5, size_of(grown));
    expect_works(grown, self);
    EXPECT_EQ(ncclSuccess, ncclCommDestroy(grown));
  });
  for (std::thread& joiner : joiners) joiner.join();
}

TEST(GrowTest, OldRanksKeepTheirPlacesAndNewOnesFollow) { grow(0); }
TEST(GrowTest, AnyOldRankMayMakeTheId) { grow(1); }

TEST(GrowTest, AnIdFromBeforeAnotherChildIsStale) {
  as_threads(1, [](Rank& self) {
    ncclUniqueId id{};
    ncclComm_t child = nullptr;
    ncclComm_t grown = nullptr;
    EXPECT_EQ(ncclSuccess, ncclCommGetUniqueId(self.communicator, &id));
    EXPECT_EQ(ncclSuccess, ncclCommSplit(self.communicator, 0, 0, &child, nullptr));

    EXPECT_EQ(ncclInvalidArgument,
              ncclCommGrow(self.communicator, 2, &id, -1, &grown, nullptr));
    EXPECT_EQ(nullptr, grown);
    EXPECT_EQ(ncclSuccess, ncclCommDestroy(child));
  });
}

TEST(GrowTest, TheFirstAndTheLastRankWaitForTheIdInTheCallEvenNonblocking) {
  Steps steps;
  std::atomic<int> returned{0};
  const auto act = [&](Rank& self) {
    ncclComm_t grown = nullptr;
    if (self.rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      EXPECT_EQ(0, returned);
      ncclUniqueId id{};
      EXPECT_EQ(ncclSuccess, ncclCommGetUniqueId(self.communicator, &id));
      while (returned < 2) std::this_thread::yield();
      steps.reach(1);
      return;
    }
    EXPECT_EQ(ncclInProgress,
              ncclCommGrow(self.communicator, 4, nullptr, -1, &grown, nullptr));
    ++returned;
    steps.await(1);
    EXPECT_EQ(ncclSuccess, ncclCommAbort(grown));  // nobody else comes
  };
  as_threads(3, act, nonblocking_config());
}

TEST(GrowTest, ArgumentsAreChecked) {
  as_threads(1, [](Rank& self) {
    const ncclUniqueId plain = new_unique_id();
    ncclUniqueId id{};
    ncclComm_t grown = nullptr;
    EXPECT_EQ(ncclSuccess, ncclCommGetUniqueId(self.communicator, &id));

    EXPECT_EQ(ncclInvalidArgument, ncclCommGetUniqueId(self.communicator, nullptr));
    EXPECT_EQ(ncclInvalidArgument, ncclCommGetUniqueId(nullptr, &id));
    const auto old = [&](int nranks, const ncclUniqueId* with, int rank) {
      return ncclCommGrow(self.communicator, nranks, with, rank, &grown, nullptr);
    };
    EXPECT_EQ(ncclInvalidArgument, old(1, &id, -1));
    EXPECT_EQ(ncclInvalidArgument, old(0, &id, -1));
    EXPECT_EQ(ncclInvalidArgument, old(2, &id, 0));
    EXPECT_EQ(ncclInvalidArgument, old(2, nullptr, -1));
    EXPECT_EQ(ncclInvalidArgument, old(2, &plain, -1));
    const auto fresh = [&](const ncclUniqueId* with, int rank) {
      return ncclCommGrow(nullptr, 2, with, rank, &grown, nullptr);
    };
    EXPECT_EQ(ncclInvalidArgument, fresh(nullptr, 1));
    EXPECT_EQ(ncclInvalidArgument, fresh(&id, 2));
    EXPECT_EQ(ncclInvalidArgument, fresh(&plain, 1));
    EXPECT_EQ(nullptr, grown);
  });
}

// Leaves out rank 2 and takes it in again, whose id it gets from the others.
void shrink_and_grow(const Rank& self) {
  ncclComm_t small = nullptr;
  if (self.rank < 2) {
    int excluded = 2;
    EXPECT_EQ(ncclSuccess,
              ncclCommShrink(self.communicator, &excluded, 1, &small, nullptr, 0));
    expect_works(small, self);
  }
  const DeviceBuffer shared(self.device, sizeof(ncclUniqueId));
  auto* const id = reinterpret_cast<ncclUniqueId*>(shared.data());
  if (self.rank == 0) {
    EXPECT_EQ(ncclSuccess, ncclCommGetUniqueId(small, id));
  }
  EXPECT_EQ(ncclSuccess,
            ncclBcast(id, sizeof *id, ncclInt8, 0, self.communicator, self.stream));
  self.synchronize();
  ncclComm_t grown = nullptr;
  EXPECT_EQ(ncclSuccess, self.rank < 2
                             ? ncclCommGrow(small, 3, nullptr, -1, &grown, nullptr)
                             : ncclCommGrow(nullptr, 3, id, 2, &grown, nullptr));
  EXPECT_EQ(self.rank, rank_of(grown));
  expect_works(grown, self);
  EXPECT_EQ(ncclSuccess, ncclCommDestroy(grown));
  EXPECT_EQ(ncclSuccess, ncclCommDestroy(small));
}

void revoke_and_split(const Rank& self) {
  EXPECT_EQ(ncclSuccess, ncclCommRevoke(self.communicator, 0));
  ncclComm_t half = nullptr;
  EXPECT_EQ(ncclSuccess, ncclCommSplit(self.communicator, self.rank % 2, -self.rank,
                                       &half, nullptr));
  EXPECT_EQ(self.rank == 0 ? 1 : 0, rank_of(half));
  expect_works(half, self);
  EXPECT_EQ(ncclSuccess, ncclCommDestroy(half));
}

// A body of processes, not a test. Hence disabled.
TEST(DISABLED_RankProcess, families) {
  be_this_process([](Rank& self) {
    shrink_and_grow(self);
    revoke_and_split(self);
  });
}

TEST(FamilyAcrossProcesses, ShrinksGrowsAndSplits) {
  EXPECT_EQ((std::vector<int>{0, 0, 0}),
            as_processes(3, "DISABLED_RankProcess.families"));
}

}  // namespace
}  // namespace weightsync::emulator::nccl
