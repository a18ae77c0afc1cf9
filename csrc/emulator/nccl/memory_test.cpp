// ncclMemAlloc, ncclMemFree, ncclCommRegister and ncclCommDeregister.
#include <gtest/gtest.h>

#include <cstdint>

#include "emulator/core.h"
#include "emulator/nccl/window_support.h"

namespace weightsync::emulator::nccl {
namespace {

TEST(NcclMemory, it_is_virtual_aligned_to_2_mib_and_goes_away) {
  ASSERT_TRUE(set_current_device(1).ok());
  const std::size_t used = memory_use(1).used;
  void* memory = nullptr;
  ASSERT_EQ(ncclSuccess, ncclMemAlloc(&memory, 5));
  const std::optional<Allocation> found = find_allocation(memory);
  ASSERT_TRUE(found);
  EXPECT_EQ(Kind::kVmm, found->kind);
  EXPECT_EQ(1, found->device);
  EXPECT_EQ(0U, reinterpret_cast<std::uintptr_t>(memory) % kVmmGranularity);
  EXPECT_EQ(used + kVmmGranularity, memory_use(1).used);
  EXPECT_EQ(ncclSuccess, ncclMemFree(memory));

  EXPECT_EQ(used, memory_use(1).used);
  EXPECT_EQ(ncclUnhandledCudaError, ncclMemFree(memory));
}

TEST(NcclMemory, nothing_is_given_for_nothing) {
  int something = 0;
  void* memory = &something;

  EXPECT_EQ(ncclSuccess, ncclMemAlloc(&memory, 0));
  EXPECT_EQ(nullptr, memory);
  EXPECT_EQ(ncclSuccess, ncclMemFree(nullptr));
  EXPECT_EQ(ncclUnhandledCudaError, ncclMemAlloc(nullptr, 8));
}

TEST(NcclMemory, what_is_no_device_memory_is_not_freed) {
  int something = 0;

  EXPECT_EQ(ncclUnhandledCudaError, ncclMemFree(&something));
}

TEST(NcclMemory, more_than_the_device_has_is_a_cuda_error) {
  void* memory = nullptr;

  EXPECT_EQ(ncclUnhandledCudaError, ncclMemAlloc(&memory, std::size_t{1} << 50));
  EXPECT_EQ(nullptr, memory);
}

TEST(NcclMemory, without_cumem_it_is_plain_and_no_window_is_to_be_had) {
  const Setting off("NCCL_CUMEM_ENABLE", "0");
  void* memory = nullptr;
  ASSERT_EQ(ncclSuccess, ncclMemAlloc(&memory, 4096));

  EXPECT_EQ(Kind::kMalloc, find_allocation(memory)->kind);
  EXPECT_EQ(ncclSuccess, ncclMemFree(memory));
}

TEST(NcclRegistration, it_is_counted_and_refuses_what_it_does_not_know) {
  as_threads(1, [](const Rank& rank) {
    const DeviceBuffer buffer(rank.device, 4096);
    void* first = nullptr;
    void* second = nullptr;
    ncclComm_t comm = rank.communicator;
    EXPECT_EQ(ncclSuccess, ncclCommRegister(comm, buffer.data(), 4096, &first));
    EXPECT_EQ(ncclSuccess, ncclCommRegister(comm, buffer.data(), 4096, &second));
    EXPECT_EQ(first, second);
    EXPECT_EQ(ncclSuccess, ncclCommDeregister(comm, first));
    EXPECT_EQ(ncclSuccess, ncclCommDeregister(comm, first));
    EXPECT_EQ(ncclInvalidUsage, ncclCommDeregister(comm, first));
    EXPECT_EQ(ncclSuccess, ncclCommDeregister(comm, nullptr));
    EXPECT_EQ(ncclInvalidArgument, ncclCommRegister(nullptr, buffer.data(), 1, &first));
    EXPECT_EQ(ncclInvalidArgument, ncclCommDeregister(nullptr, nullptr));
  });
}

TEST(NcclRegistration, it_may_be_switched_off) {
  const Setting off("NCCL_LOCAL_REGISTER", "0");
  as_threads(1, [](const Rank& rank) {
    const DeviceBuffer buffer(rank.device, 4096);
    int something = 0;
    void* handle = &something;

    EXPECT_EQ(ncclSuccess,
              ncclCommRegister(rank.communicator, buffer.data(), 4096, &handle));
    EXPECT_EQ(nullptr, handle);
  });
}

}  // namespace
}  // namespace weightsync::emulator::nccl
