// Nonblocking communicators: what returns at once, what is in progress, and when
// handles are there.
#include <gtest/gtest.h>

#include <atomic>
#include <utility>

#include "emulator/nccl/config_support.h"
#include "emulator/nccl/rank_support.h"
#include "emulator/nccl/window_support.h"

namespace weightsync::emulator::nccl {
namespace {

ncclComm_t no_communicator() { return reinterpret_cast<ncclComm_t>(0x5); }

ncclResult_t state_of(ncclComm_t communicator) {
  ncclResult_t state = ncclInternalError;
  EXPECT_EQ(ncclSuccess, ncclCommGetAsyncError(communicator, &state));
  return state;
}

// Polls to success after a call that says that it goes on.
void expect_to_go_on(ncclResult_t called, ncclComm_t communicator) {
  EXPECT_EQ(ncclInProgress, called);
  EXPECT_EQ(ncclSuccess, poll(communicator));
}

TEST(Nonblocking, a_window_is_there_when_the_communicator_is_through) {
  Steps steps;
  const auto register_one = [&](Rank& self) {
    const DeviceBuffer memory(self.device, 4096, Kind::kVmm);
    ncclWindow_t window = reinterpret_cast<ncclWindow_t>(0x5);
    if (self.rank == 1) steps.await(1);
    EXPECT_EQ(ncclSuccess, ncclCommWindowRegister(self.communicator, memory.data(),
                                                  4096, &window, kSymmetric));
    if (self.rank == 0) {  // rank 1 has not come yet
      EXPECT_EQ(ncclInProgress, state_of(self.communicator));
      EXPECT_EQ(nullptr, window);
      int size = 0;
      EXPECT_EQ(ncclInvalidArgument, ncclCommCount(self.communicator, &size));
      steps.reach(1);
    }
    EXPECT_EQ(ncclSuccess, poll(self.communicator));
    EXPECT_NE(nullptr, window);
    EXPECT_EQ(ncclSuccess, ncclCommWindowDeregister(self.communicator, window));
  };
  as_threads(2, register_one, nonblocking_config());
}

TEST(Nonblocking, a_window_that_is_refused_fails_the_communicator) {
  as_threads(
      1,
      [](Rank& self) {
        const DeviceBuffer plain(self.device, 4096, Kind::kMalloc);
        ncclWindow_t window = nullptr;
        EXPECT_EQ(ncclSuccess, ncclCommWindowRegister(self.communicator, plain.data(),
                                                      8, &window, kSymmetric));
        EXPECT_EQ(ncclUnhandledCudaError, poll(self.communicator));
        EXPECT_EQ(nullptr, window);
        EXPECT_EQ(ncclUnhandledCudaError, ncclCommDestroy(self.communicator));
        EXPECT_EQ(ncclSuccess,
                  ncclCommAbort(std::exchange(self.communicator, nullptr)));
      },
      nonblocking_config());
}

TEST(Nonblocking, operations_are_in_progress_until_they_are_enqueued) {
  as_threads(
      2,
      [](Rank& self) {
        ncclComm_t comm = self.communicator;
        const int peer = 1 - self.rank;
        const DeviceBuffer memory(self.device, 4096, Kind::kVmm);
        auto* const words = reinterpret_cast<std::uint64_t*>(memory.data());
        ncclWindow_t window = nullptr;
        EXPECT_EQ(ncclSuccess,
                  ncclCommWindowRegister(comm, words, 4096, &window, kSymmetric));
        EXPECT_EQ(ncclSuccess, poll(comm));
        words[0] = 7;
        expect_to_go_on(ncclPutSignal(words, 1, ncclUint64, peer, window, 8, 0, 0, 0,
                                      comm, self.stream),
                        comm);
        expect_to_go_on(wait_for(self, peer, 1), comm);
        expect_to_go_on(ncclAllReduce(words + 1, words + 2, 1, ncclUint64, ncclSum,
                                      comm, self.stream),
                        comm);
        self.synchronize();
        EXPECT_EQ(7U, words[1]);
        EXPECT_EQ(14U, words[2]);
      },
      nonblocking_config());
}

TEST(Nonblocking, a_group_is_in_progress_and_calls_in_it_are_not) {
  as_threads(
      2,
      [](Rank& self) {
        const DeviceBuffer memory(self.device, 64);
        auto* const values = reinterpret_cast<std::int32_t*>(memory.data());
        values[0] = values[1] = 1;
        ncclComm_t comm = self.communicator;
        ncclGroupStart();
        for (int i = 0; i < 2; ++i) {
          EXPECT_EQ(ncclSuccess, ncclAllReduce(values + i, values + i, 1, ncclInt32,
                                               ncclSum, comm, self.stream));
        }
        expect_to_go_on(ncclGroupEnd(), comm);
        self.synchronize();
        EXPECT_EQ(2, values[0]);
        EXPECT_EQ(2, values[1]);
      },
      nonblocking_config());
}

// The child of a split or shrink, which is asked for with `make`, is NULL until the
// parent is through.
template <class Make>
void expect_late_child(const Make& make) {
  Steps steps;
  const auto act = [&](Rank& self) {
    ncclComm_t child = no_communicator();
    if (self.rank == 1) steps.await(1);
    EXPECT_EQ(ncclSuccess, make(self.communicator, &child));
    if (self.rank == 0) {
      EXPECT_EQ(ncclInProgress, state_of(self.communicator));
      EXPECT_EQ(nullptr, child);
      steps.reach(1);
    }
    EXPECT_EQ(ncclSuccess, poll(self.communicator));
    int size = 0;
    EXPECT_EQ(ncclSuccess, ncclCommCount(child, &size));
    EXPECT_EQ(2, size);
    EXPECT_EQ(ncclSuccess, ncclCommDestroy(child));
  };
  as_threads(2, act, nonblocking_config());
}

TEST(Nonblocking, a_child_of_a_split_is_there_when_the_parent_is_through) {
  expect_late_child([](ncclComm_t parent, ncclComm_t* child) {
    return ncclCommSplit(parent, 0, 0, child, nullptr);
  });
}

TEST(Nonblocking, a_child_of_a_shrink_is_there_when_the_parent_is_through) {
  expect_late_child([](ncclComm_t parent, ncclComm_t* child) {
    int excluded = 99;
    return ncclCommShrink(parent, &excluded, 1, child, nullptr, kNcclShrinkDefault);
  });
}

TEST(Nonblocking, a_grown_communicator_is_there_at_once_and_is_polled_itself) {
  ncclUniqueId id{};
  Steps steps;
  std::thread joiner([&] {
    steps.await(1);
    ASSERT_TRUE(set_current_device(1).ok());
    ncclConfig_t config = nonblocking_config();
    ncclComm_t grown = nullptr;
    EXPECT_EQ(ncclInProgress, ncclCommGrow(nullptr, 2, &id, 1, &grown, &config));
    ASSERT_NE(nullptr, grown);
    EXPECT_EQ(ncclSuccess, poll(grown));
    EXPECT_EQ(ncclSuccess, ncclCommDestroy(grown));
  });
  as_threads(
      1,
      [&](Rank& self) {
        EXPECT_EQ(ncclSuccess, ncclCommGetUniqueId(self.communicator, &id));
        ncclComm_t grown = nullptr;
        EXPECT_EQ(ncclInProgress,
                  ncclCommGrow(self.communicator, 2, &id, -1, &grown, nullptr));
        ASSERT_NE(nullptr, grown);
        EXPECT_EQ(ncclInProgress, state_of(grown));
        EXPECT_EQ(ncclSuccess,
                  state_of(self.communicator));  // the parent does not care
        steps.reach(1);
        EXPECT_EQ(ncclSuccess, poll(grown));
        EXPECT_EQ(ncclSuccess, ncclCommDestroy(grown));
      },
      nonblocking_config());
  joiner.join();
}

TEST(Nonblocking, a_communicator_that_is_revoked_while_it_is_made_has_failed) {
  const ncclUniqueId id = new_unique_id();
  ncclConfig_t config = nonblocking_config();
  ncclComm_t comm = nullptr;
  ASSERT_EQ(ncclInProgress, ncclCommInitRankConfig(&comm, 2, id, 0, &config));
  ncclComm_t child = nullptr;
  int rank = 0;

  EXPECT_EQ(ncclInternalError, ncclCommRevoke(comm, 0));
  EXPECT_EQ(ncclInternalError, poll(comm));
  EXPECT_EQ(ncclInternalError, ncclCommUserRank(comm, &rank));
  EXPECT_EQ(ncclInternalError, ncclCommSplit(comm, 0, 0, &child, nullptr));
  EXPECT_EQ(ncclSuccess, ncclCommAbort(comm));
}

TEST(Nonblocking, finalize_goes_on_and_destroy_and_abort_do_not) {
  as_threads(
      1,
      [](Rank& self) {
        expect_to_go_on(ncclCommFinalize(self.communicator), self.communicator);
        EXPECT_EQ(ncclSuccess,
                  ncclCommDestroy(std::exchange(self.communicator, nullptr)));
      },
      nonblocking_config());
  as_threads(
      1,
      [](Rank& self) {
        EXPECT_EQ(ncclSuccess,
                  ncclCommAbort(std::exchange(self.communicator, nullptr)));
      },
      nonblocking_config());
}

}  // namespace
}  // namespace weightsync::emulator::nccl
