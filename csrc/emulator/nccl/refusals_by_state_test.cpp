// Every function of nccl.h that takes a communicator, by the state of that
// communicator: none, foreign, revoked, suspended, in progress, failed.
#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "emulator/nccl/config_support.h"
#include "emulator/nccl/rank_support.h"
#include "emulator/nccl/window_support.h"

namespace weightsync::emulator::nccl {
namespace {

// Buffers and results of any call; nothing is ever executed on them.
struct Arguments {
  DeviceBuffer memory{0, 4096, Kind::kVmm};
  int number = 0;
  int excluded = 1;
  std::uint64_t statistic = 0;
  void* handle = nullptr;
  ncclComm_t child = nullptr;
  ncclWindow_t window = nullptr;
  ncclRedOp_t op = ncclSum;
  ncclUniqueId id{};
  ncclWaitSignalDesc_t descriptor{1, 0, 0, 0};
};

struct Call {
  std::string name;
  std::function<ncclResult_t(ncclComm_t, Arguments&)> make;
};

using Calls = std::vector<Call>;

// What a rank does with the others: collectives, messages and one-sided calls.
Calls operations() {
  constexpr auto kType = ncclFloat32;
  const auto at = [](Arguments& a) { return a.memory.data(); };
  return {
      {"AllReduce",
       [=](ncclComm_t c, Arguments& a) {
         return ncclAllReduce(at(a), at(a), 1, kType, ncclSum, c, nullptr);
       }},
      {"Reduce",
       [=](ncclComm_t c, Arguments& a) {
         return ncclReduce(at(a), at(a), 1, kType, ncclSum, 0, c, nullptr);
       }},
      {"Broadcast",
       [=](ncclComm_t c, Arguments& a) {
         return ncclBroadcast(at(a), at(a), 1, kType, 0, c, nullptr);
       }},
      {"Bcast",
       [=](ncclComm_t c, Arguments& a) {
         return ncclBcast(at(a), 1, kType, 0, c, nullptr);
       }},
      {"ReduceScatter",
       [=](ncclComm_t c, Arguments& a) {
         return ncclReduceScatter(at(a), at(a), 1, kType, ncclSum, c, nullptr);
       }},
      {"AllGather",
       [=](ncclComm_t c, Arguments& a) {
         return ncclAllGather(at(a), at(a), 1, kType, c, nullptr);
       }},
      {"AlltoAll",
       [=](ncclComm_t c, Arguments& a) {
         return ncclAlltoAll(at(a), at(a), 1, kType, c, nullptr);
       }},
      {"Gather",
       [=](ncclComm_t c, Arguments& a) {
         return ncclGather(at(a), at(a), 1, kType, 0, c, nullptr);
       }},
      {"Scatter",
       [=](ncclComm_t c, Arguments& a) {
         return ncclScatter(at(a), at(a), 1, kType, 0, c, nullptr);
       }},
      {"Send", [=](ncclComm_t c,
                   Arguments& a) { return ncclSend(at(a), 1, kType, 0, c, nullptr); }},
      {"Recv", [=](ncclComm_t c,
                   Arguments& a) { return ncclRecv(at(a), 1, kType, 0, c, nullptr); }},
      {"PutSignal",
       [=](ncclComm_t c, Arguments& a) {
         return ncclPutSignal(at(a), 1, kType, 0, a.window, 0, 0, 0, 0, c, nullptr);
       }},
      {"Signal",
       [](ncclComm_t c, Arguments&) { return ncclSignal(0, 0, 0, 0, c, nullptr); }},
      {"WaitSignal",
       [](ncclComm_t c, Arguments& a) {
         return ncclWaitSignal(1, &a.descriptor, c, nullptr);
       }},
  };
}

Calls getters() {
  return {
      {"Count", [](ncclComm_t c, Arguments& a) { return ncclCommCount(c, &a.number); }},
      {"CuDevice",
       [](ncclComm_t c, Arguments& a) { return ncclCommCuDevice(c, &a.number); }},
      {"UserRank",
       [](ncclComm_t c, Arguments& a) { return ncclCommUserRank(c, &a.number); }},
  };
}

// What else needs a communicator that is ready.
Calls others() {
  return {
      {"RedOpCreatePreMulSum",
       [](ncclComm_t c, Arguments& a) {
         return ncclRedOpCreatePreMulSum(&a.op, &a.number, ncclInt32,
                                         ncclScalarHostImmediate, c);
       }},
      {"CommRegister",
       [](ncclComm_t c, Arguments& a) {
         return ncclCommRegister(c, a.memory.data(), 8, &a.handle);
       }},
      {"CommWindowRegister",
       [](ncclComm_t c, Arguments& a) {
         return ncclCommWindowRegister(c, a.memory.data(), 8, &a.window, kSymmetric);
       }},
      {"CommSplit",
       [](ncclComm_t c, Arguments& a) {
         return ncclCommSplit(c, 0, 0, &a.child, nullptr);
       }},
      {"CommShrink",
       [](ncclComm_t c, Arguments& a) {
         return ncclCommShrink(c, &a.excluded, 1, &a.child, nullptr, 0);
       }},
      {"CommGetUniqueId",
       [](ncclComm_t c, Arguments& a) { return ncclCommGetUniqueId(c, &a.id); }},
      {"CommGrow",
       [](ncclComm_t c, Arguments& a) {
         return ncclCommGrow(c, 9, &a.id, -1, &a.child, nullptr);
       }},
      {"CommSuspend",
       [](ncclComm_t c, Arguments&) { return ncclCommSuspend(c, kNcclSuspendMemory); }},
      {"CommResume", [](ncclComm_t c, Arguments&) { return ncclCommResume(c); }},
  };
}

void expect_each(ncclResult_t code, const std::vector<Calls>& lists, ncclComm_t comm) {
  Arguments arguments;
  for (const Calls& calls : lists) {
    for (const Call& call : calls) {
      EXPECT_EQ(code, call.make(comm, arguments)) << "nccl" << call.name;
    }
  }
}

TEST(RefusalsByState, nothing_works_on_what_is_no_communicator) {
  Calls rest = others();
  // Without a communicator it is the call of a new rank.
  rest.erase(rest.begin() + 6);
  int foreign = 0;

  expect_each(ncclInvalidArgument, {operations(), getters(), rest}, nullptr);
  expect_each(ncclInvalidArgument, {operations(), getters(), others()},
              reinterpret_cast<ncclComm_t>(&foreign));
}

TEST(RefusalsByState, a_revoked_communicator_takes_no_operation_but_tells_who_it_is) {
  as_threads(1, [](Rank& self) {
    ASSERT_EQ(ncclSuccess, ncclCommRevoke(self.communicator, 0));

    expect_each(ncclInvalidUsage, {operations()}, self.communicator);
    expect_each(ncclSuccess, {getters()}, self.communicator);
  });
}

TEST(RefusalsByState, a_suspended_communicator_takes_no_operation_until_it_is_resumed) {
  as_threads(1, [](Rank& self) {
    ASSERT_EQ(ncclSuccess, ncclCommSuspend(self.communicator, kNcclSuspendMemory));

    expect_each(ncclInvalidUsage, {operations()}, self.communicator);
    expect_each(ncclSuccess, {getters()}, self.communicator);
    EXPECT_EQ(ncclInvalidUsage, ncclCommSuspend(self.communicator, kNcclSuspendMemory));
    EXPECT_EQ(ncclSuccess, ncclCommResume(self.communicator));
    EXPECT_EQ(ncclSuccess, send_signal(self, 0));
    EXPECT_EQ(ncclSuccess, wait_for(self, 0, 1));
  });
}

TEST(RefusalsByState, a_communicator_in_progress_takes_nothing_but_an_abort) {
  const ncclUniqueId id = new_unique_id();
  ncclConfig_t config = nonblocking_config();
  ncclComm_t comm = nullptr;
  ASSERT_EQ(ncclInProgress, ncclCommInitRankConfig(&comm, 2, id, 0, &config));

  expect_each(ncclInvalidArgument, {operations(), getters(), others()}, comm);
  EXPECT_EQ(ncclInvalidArgument, ncclCommFinalize(comm));
  EXPECT_EQ(ncclInvalidArgument, ncclCommDestroy(comm));
  EXPECT_EQ(ncclSuccess, ncclCommAbort(comm));
}

TEST(RefusalsByState, a_failed_communicator_answers_with_its_error_to_everything) {
  const ncclUniqueId id = new_unique_id();
  ncclConfig_t config = nonblocking_config();
  ncclComm_t both[2] = {};
  for (int rank = 0; rank < 2; ++rank) {  // on one device
    ASSERT_EQ(ncclInProgress,
              ncclCommInitRankConfig(&both[rank], 2, id, rank, &config));
  }
  ASSERT_EQ(ncclInvalidUsage, poll(both[0]));
  ASSERT_EQ(ncclInvalidUsage, poll(both[1]));

  expect_each(ncclInvalidUsage, {operations(), getters(), others()}, both[0]);
  EXPECT_EQ(ncclInvalidUsage, ncclCommFinalize(both[0]));
  EXPECT_EQ(ncclInvalidUsage, ncclCommDestroy(both[0]));
  EXPECT_EQ(ncclInvalidUsage, poll(both[0]));
  EXPECT_EQ(ncclSuccess, ncclCommAbort(both[0]));
  EXPECT_EQ(ncclSuccess, ncclCommAbort(both[1]));
}

TEST(RefusalsByState, whoever_left_is_no_communicator) {
  for (const auto leave : {ncclCommDestroy, ncclCommAbort}) {
    as_threads(1, [leave](Rank& self) {
      ncclComm_t const dead = std::exchange(self.communicator, nullptr);
      ASSERT_EQ(ncclSuccess, leave(dead));

      expect_each(ncclInvalidArgument, {operations(), getters(), others()}, dead);
      EXPECT_EQ(ncclInvalidArgument, ncclCommDestroy(dead));
      EXPECT_EQ(ncclInvalidArgument, ncclCommAbort(dead));
      EXPECT_EQ(ncclInvalidArgument, ncclCommFinalize(dead));
      EXPECT_EQ(ncclInvalidArgument, ncclCommRevoke(dead, 0));
    });
  }
}

TEST(RefusalsByState, a_dead_handle_never_comes_back) {
  std::set<ncclComm_t> handles;
  constexpr int kTimes = 20;
  for (int time = 0; time < kTimes; ++time) {
    as_threads(1, [&](Rank& self) { handles.insert(self.communicator); });
  }

  EXPECT_EQ(std::size_t{kTimes}, handles.size());
}

TEST(RefusalsByState, results_need_a_place) {
  as_threads(1, [](Rank& self) {
    ncclComm_t comm = self.communicator;

    EXPECT_EQ(ncclInvalidArgument, ncclCommCount(comm, nullptr));
    EXPECT_EQ(ncclInvalidArgument, ncclCommCuDevice(comm, nullptr));
    EXPECT_EQ(ncclInvalidArgument, ncclCommUserRank(comm, nullptr));
    EXPECT_EQ(ncclInvalidArgument, ncclCommGetAsyncError(comm, nullptr));
    EXPECT_EQ(ncclInvalidArgument, ncclCommGetUniqueId(comm, nullptr));
    EXPECT_EQ(ncclInvalidArgument,
              ncclCommMemStats(comm, ncclStatGpuMemTotal, nullptr));
    EXPECT_EQ(ncclInvalidArgument,
              ncclCommGrow(comm, 2, nullptr, -1, nullptr, nullptr));
  });
}

}  // namespace
}  // namespace weightsync::emulator::nccl
