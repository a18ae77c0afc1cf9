// Communicators that share resources (splitShare, shrinkShare): one order of
// operations for all of them, and nothing else in common.
#include <gtest/gtest.h>

#include <functional>

#include "emulator/nccl/config_support.h"
#include "emulator/nccl/rank_support.h"
#include "emulator/nccl/window_support.h"

namespace weightsync::emulator::nccl {
namespace {

using MakeChild = std::function<ncclComm_t(const Rank&)>;

ncclConfig_t sharing(int ncclConfig_t::* field) {
  ncclConfig_t config = undefined_config();
  config.*field = 1;
  return config;
}

ncclComm_t split_off(const Rank& self) {
  ncclComm_t child = nullptr;
  EXPECT_EQ(ncclSuccess,
            ncclCommSplit(self.communicator, 0, self.rank, &child, nullptr));
  return child;
}

// Excludes a rank that does not exist, which is not checked: the child has them all.
ncclComm_t shrink_to(const Rank& self, int flags) {
  int excluded[] = {99};
  ncclComm_t child = nullptr;
  EXPECT_EQ(ncclSuccess,
            ncclCommShrink(self.communicator, excluded, 1, &child, nullptr, flags));
  return child;
}

// Whether a wait in `waiting`, which nobody satisfies yet, holds up a signal in
// `other`. All ranks call it; rank 1 waits for rank 0.
void expect_blocking(bool blocks, const Rank& waiting, const Rank& other, Steps& steps,
                     int step) {
  if (waiting.rank == 0) {
    steps.await(step);
    EXPECT_EQ(ncclSuccess, send_signal(waiting, 1));
    waiting.synchronize();
    return;
  }
  const OwnStream first;
  const OwnStream second;
  EXPECT_EQ(ncclSuccess, wait_for(waiting, 0, 1, first.get()));
  EXPECT_EQ(ncclSuccess, send_signal(other, 1, second.get()));
  EXPECT_EQ(ncclSuccess, wait_for(other, 1, 1, second.get()));
  if (blocks) {
    EXPECT_TRUE(stays_busy(second));
  } else {
    second.synchronize();
    EXPECT_FALSE(first.is_idle());
  }
  steps.reach(step);
  first.synchronize();
  second.synchronize();
}

void expect_both_ways(bool blocks, const MakeChild& make, const ncclConfig_t& config) {
  Steps steps;
  as_threads(
      2,
      [&](Rank& parent) {
        Rank child = parent;
        child.communicator = make(parent);
        meet(parent);
        meet(child);
        expect_blocking(blocks, parent, child, steps, 1);
        expect_blocking(blocks, child, parent, steps, 2);
        meet(parent);
        EXPECT_EQ(ncclSuccess, ncclCommDestroy(child.communicator));
      },
      config);
}

TEST(Sharing, after_a_split_a_wait_in_one_blocks_the_other) {
  expect_both_ways(true, split_off, sharing(&ncclConfig_t::splitShare));
}

TEST(Sharing, after_a_shrink_a_wait_in_one_blocks_the_other) {
  const auto shrink = [](const Rank& self) {
    return shrink_to(self, kNcclShrinkDefault);
  };
  expect_both_ways(true, shrink, sharing(&ncclConfig_t::shrinkShare));
}

TEST(Sharing, the_configuration_of_a_split_does_not_apply_to_a_shrink) {
  const auto shrink = [](const Rank& self) {
    return shrink_to(self, kNcclShrinkDefault);
  };
  expect_both_ways(false, shrink, sharing(&ncclConfig_t::splitShare));
  expect_both_ways(false, split_off, sharing(&ncclConfig_t::shrinkShare));
}

TEST(Sharing, an_aborting_shrink_never_shares) {
  const auto shrink = [](const Rank& self) {
    return shrink_to(self, kNcclShrinkAbort);
  };
  expect_both_ways(false, shrink, sharing(&ncclConfig_t::shrinkShare));
}

TEST(Sharing, the_child_of_a_revoked_communicator_never_shares) {
  as_threads(
      1,
      [](Rank& self) {
        ASSERT_EQ(ncclSuccess, ncclCommRevoke(self.communicator, 0));
        ncclComm_t const child = split_off(self);
        // What shares cannot be suspended.
        EXPECT_EQ(ncclSuccess, ncclCommSuspend(child, kNcclSuspendMemory));
        EXPECT_EQ(ncclSuccess, ncclCommDestroy(child));
      },
      sharing(&ncclConfig_t::splitShare));
}

TEST(Sharing, whoever_shares_is_not_suspended) {
  as_threads(
      1,
      [](Rank& self) {
        ncclComm_t const child = split_off(self);
        EXPECT_EQ(ncclInvalidUsage,
                  ncclCommSuspend(self.communicator, kNcclSuspendMemory));
        EXPECT_EQ(ncclInvalidUsage, ncclCommSuspend(child, kNcclSuspendMemory));
        EXPECT_EQ(ncclSuccess, ncclCommDestroy(child));
        EXPECT_EQ(ncclSuccess, ncclCommSuspend(self.communicator, kNcclSuspendMemory));
        EXPECT_EQ(ncclSuccess, ncclCommResume(self.communicator));
      },
      sharing(&ncclConfig_t::splitShare));
}

}  // namespace
}  // namespace weightsync::emulator::nccl
