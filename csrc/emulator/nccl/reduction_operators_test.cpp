// Operators of one's own, through the C ABI.

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "emulator/nccl/rank_support.h"

namespace weightsync::emulator::nccl {
namespace {

TEST(ReductionOperators, scale_by_a_factor_known_at_the_call) {
  as_threads(2, [](Rank& rank) {
    const DeviceBuffer memory(rank.device, 8);
    auto* const values = reinterpret_cast<float*>(memory.data());
    values[0] = 4;
    float factor = rank.rank == 0 ? 0.5F : 0.25F;  // of its own for each rank
    ncclRedOp_t op{};
    ASSERT_EQ(ncclSuccess,
              ncclRedOpCreatePreMulSum(&op, &factor, ncclFloat32,
                                       ncclScalarHostImmediate, rank.communicator));
    factor = 100;
    ASSERT_EQ(ncclSuccess, ncclAllReduce(values, values + 1, 1, ncclFloat32, op,
                                         rank.communicator, rank.stream));
    // What the call needs, it has copied.
    ASSERT_EQ(ncclSuccess, ncclRedOpDestroy(op, rank.communicator));
    rank.synchronize();

    EXPECT_EQ(3, values[1]);
  });
}

TEST(ReductionOperators, read_a_factor_on_the_device_when_the_collective_executes) {
  for (const int size : {1, 2}) {
    as_threads(size, [](Rank& rank) {
      const DeviceBuffer memory(rank.device, 12);
      auto* const values = reinterpret_cast<float*>(memory.data());
      values[0] = 4;
      values[2] = 100;
      ncclRedOp_t op{};
      ASSERT_EQ(ncclSuccess,
                ncclRedOpCreatePreMulSum(&op, values + 2, ncclFloat32, ncclScalarDevice,
                                         rank.communicator));
      stream_of(rank.stream)->enqueue("a kernel", [values] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        values[2] = 0.5F;
      });
      ASSERT_EQ(ncclSuccess, ncclAllReduce(values, values + 1, 1, ncclFloat32, op,
                                           rank.communicator, rank.stream));
      rank.synchronize();

      EXPECT_EQ(2.0F * static_cast<float>(rank.size), values[1]);
      EXPECT_EQ(ncclSuccess, ncclRedOpDestroy(op, rank.communicator));
    });
  }
}

TEST(ReductionOperators, belong_to_one_communicator_and_one_type) {
  as_threads(1, [](Rank& rank) {
    const DeviceBuffer memory(rank.device, 64);
    double factor = 2;
    ncclRedOp_t op{};
    const auto create = [&](int type, ncclScalarResidence_t residence) {
      return ncclRedOpCreatePreMulSum(&op, &factor, static_cast<ncclDataType_t>(type),
                                      residence, rank.communicator);
    };
    const auto use = [&](ncclDataType_t type, std::size_t count) {
      return ncclAllReduce(memory.data(), memory.data(), count, type, op,
                           rank.communicator, rank.stream);
    };
    EXPECT_EQ(ncclInternalError, create(12, ncclScalarHostImmediate));
    ASSERT_EQ(ncclSuccess, create(ncclFloat64, ncclScalarHostImmediate));

    EXPECT_EQ(ncclSuccess, use(ncclFloat64, 1));
    EXPECT_EQ(ncclInvalidArgument, use(ncclFloat32, 1));
    EXPECT_EQ(ncclSuccess,
              use(ncclFloat32, 0));  // dropped before the type is looked at
    EXPECT_EQ(ncclInvalidArgument, ncclRedOpDestroy(ncclAvg, rank.communicator));
    EXPECT_EQ(ncclInvalidArgument,
              ncclRedOpDestroy(static_cast<ncclRedOp_t>(-7), rank.communicator));
    EXPECT_EQ(ncclInvalidArgument, ncclRedOpDestroy(op, nullptr));
    EXPECT_EQ(ncclSuccess, ncclRedOpDestroy(op, rank.communicator));
    EXPECT_EQ(ncclInvalidArgument, ncclRedOpDestroy(op, rank.communicator));
    EXPECT_EQ(ncclInvalidArgument, use(ncclFloat64, 1));
    rank.synchronize();
  });
}

TEST(ReductionOperators, are_unknown_to_another_communicator) {
  as_threads(1, [](Rank& rank) {
    const DeviceBuffer memory(rank.device, 4);
    int factor = 2;
    ncclRedOp_t op{};
    ncclComm_t child = nullptr;
    ASSERT_EQ(ncclSuccess, ncclCommSplit(rank.communicator, 0, 0, &child, nullptr));
    ASSERT_EQ(ncclSuccess,
              ncclRedOpCreatePreMulSum(&op, &factor, ncclInt32, ncclScalarHostImmediate,
                                       rank.communicator));

    EXPECT_EQ(ncclInvalidArgument, ncclAllReduce(memory.data(), memory.data(), 1,
                                                 ncclInt32, op, child, rank.stream));
    EXPECT_EQ(ncclInvalidArgument, ncclRedOpDestroy(op, child));
    EXPECT_EQ(ncclSuccess, ncclRedOpDestroy(op, rank.communicator));
    EXPECT_EQ(ncclSuccess, ncclCommDestroy(child));
  });
}

TEST(ReductionOperators, may_be_destroyed_before_the_end_of_the_group_that_uses_them) {
  as_threads(2, [](Rank& rank) {
    const DeviceBuffer memory(rank.device, 4);
    auto* const value = reinterpret_cast<std::int32_t*>(memory.data());
    *value = 5;
    int factor = 3;
    ncclRedOp_t op{};
    ASSERT_EQ(ncclSuccess,
              ncclRedOpCreatePreMulSum(&op, &factor, ncclInt32, ncclScalarHostImmediate,
                                       rank.communicator));
    ncclGroupStart();
    EXPECT_EQ(ncclSuccess, ncclAllReduce(value, value, 1, ncclInt32, op,
                                         rank.communicator, rank.stream));
    EXPECT_EQ(ncclSuccess, ncclRedOpDestroy(op, rank.communicator));
    EXPECT_EQ(ncclSuccess, ncclGroupEnd());
    rank.synchronize();

    EXPECT_EQ(30, *value);
  });
}

TEST(ReductionOperators, of_one_rank_scale_at_the_call_even_in_a_group) {
  as_threads(1, [](Rank& rank) {
    const DeviceBuffer memory(rank.device, 8);
    auto* const values = reinterpret_cast<float*>(memory.data());
    values[0] = 4;
    float factor = 0.5F;
    ncclRedOp_t op{};
    ASSERT_EQ(ncclSuccess,
              ncclRedOpCreatePreMulSum(&op, &factor, ncclFloat32,
                                       ncclScalarHostImmediate, rank.communicator));
    ncclGroupStart();
    EXPECT_EQ(ncclSuccess, ncclAllReduce(values, values + 1, 1, ncclFloat32, op,
                                         rank.communicator, rank.stream));
    rank.synchronize();
    EXPECT_EQ(2, values[1]);
    EXPECT_EQ(ncclSuccess, ncclGroupEnd());
  });
}

}  // namespace
}  // namespace weightsync::emulator::nccl
