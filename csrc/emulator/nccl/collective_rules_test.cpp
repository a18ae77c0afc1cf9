// What every collective refuses, through the C ABI, and what the oldest of them does.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "emulator/nccl/rank_support.h"

namespace weightsync::emulator::nccl {
namespace {

// Numbers that any collective may get; each ignores what it does not take.
struct Numbers {
  std::size_t count = 1;
  int type = ncclInt32;
  int op = ncclSum;
  int root = 0;
};

struct Function {
  std::string name;
  bool has_root;
  bool reduces;
  std::function<ncclResult_t(const Rank&, void*, const Numbers&)> call;
};

ncclDataType_t type_of(const Numbers& n) { return static_cast<ncclDataType_t>(n.type); }
ncclRedOp_t op_of(const Numbers& n) { return static_cast<ncclRedOp_t>(n.op); }

std::vector<Function> all_collectives() {
  return {
      {"AllReduce", false, true,
       [](const Rank& r, void* b, const Numbers& n) {
         return ncclAllReduce(b, b, n.count, type_of(n), op_of(n), r.communicator,
                              r.stream);
       }},
      {"Reduce", true, true,
       [](const Rank& r, void* b, const Numbers& n) {
         return ncclReduce(b, b, n.count, type_of(n), op_of(n), n.root, r.communicator,
                           r.stream);
       }},
      {"ReduceScatter", false, true,
       [](const Rank& r, void* b, const Numbers& n) {
         return ncclReduceScatter(b, b, n.count, type_of(n), op_of(n), r.communicator,
                                  r.stream);
       }},
      {"Broadcast", true, false,
       [](const Rank& r, void* b, const Numbers& n) {
         return ncclBroadcast(b, b, n.count, type_of(n), n.root, r.communicator,
                              r.stream);
       }},
      {"Bcast", true, false,
       [](const Rank& r, void* b, const Numbers& n) {
         return ncclBcast(b, n.count, type_of(n), n.root, r.communicator, r.stream);
       }},
      {"AllGather", false, false,
       [](const Rank& r, void* b, const Numbers& n) {
         return ncclAllGather(b, b, n.count, type_of(n), r.communicator, r.stream);
       }},
      {"AlltoAll", false, false,
       [](const Rank& r, void* b, const Numbers& n) {
         return ncclAlltoAll(b, static_cast<char*>(b) + 8, n.count, type_of(n),
                             r.communicator, r.stream);
       }},
      {"Gather", true, false,
       [](const Rank& r, void* b, const Numbers& n) {
         return ncclGather(b, b, n.count, type_of(n), n.root, r.communicator, r.stream);
       }},
      {"Scatter", true, false,
       [](const Rank& r, void* b, const Numbers& n) {
         return ncclScatter(b, b, n.count, type_of(n), n.root, r.communicator,
                            r.stream);
       }},
  };
}

TEST(CollectiveRules, types_operators_and_roots_have_to_exist) {
  as_threads(1, [](Rank& self) {
    const DeviceBuffer memory(self.device, 64);
    for (const Function& each : all_collectives()) {
      const auto code = [&](const Numbers& numbers) {
        return each.call(self, memory.data(), numbers);
      };
      const auto if_it_matters = [](bool matters) {
        return matters ? ncclInvalidArgument : ncclSuccess;
      };
      EXPECT_EQ(ncclSuccess, code({})) << each.name;
      EXPECT_EQ(ncclInvalidArgument, code({1, 12})) << each.name;
      EXPECT_EQ(ncclInvalidArgument, code({1, -1})) << each.name;
      for (const int op : {-1, 5, 1000}) {
        EXPECT_EQ(if_it_matters(each.reduces), code({1, ncclInt32, op})) << each.name;
      }
      for (const int root : {-1, 1}) {
        EXPECT_EQ(if_it_matters(each.has_root), code({1, ncclInt32, ncclSum, root}))
            << each.name;
      }
      // Nothing to do is checked all the same.
      EXPECT_EQ(ncclSuccess, code({0})) << each.name;
      EXPECT_EQ(ncclInvalidArgument, code({0, 12})) << each.name;
    }
    self.synchronize();
  });
}

TEST(CollectiveRules, bcast_works_in_one_buffer) {
  as_threads(3, [](Rank& self) {
    const DeviceBuffer memory(self.device, 4);
    auto* const value = reinterpret_cast<std::int32_t*>(memory.data());
    *value = self.rank;
    EXPECT_EQ(ncclSuccess,
              ncclBcast(value, 1, ncclInt32, 2, self.communicator, self.stream));
    self.synchronize();
    EXPECT_EQ(2, *value);
  });
}

TEST(CollectiveRules, buffers_that_are_not_used_may_be_null) {
  as_threads(2, [](Rank& self) {
    const DeviceBuffer memory(self.device, 8);
    auto* const value = reinterpret_cast<std::int32_t*>(memory.data());
    void* const of_root = self.rank == 1 ? value + 1 : nullptr;
    *value = 3;
    EXPECT_EQ(ncclSuccess, ncclReduce(value, of_root, 1, ncclInt32, ncclSum, 1,
                                      self.communicator, self.stream));
    EXPECT_EQ(ncclSuccess, ncclBroadcast(of_root, value, 1, ncclInt32, 1,
                                         self.communicator, self.stream));
    self.synchronize();
    EXPECT_EQ(6, *value);
  });
}

}  // namespace
}  // namespace weightsync::emulator::nccl
