// Windows over memory of several pieces, and on communicators that were revoked or
// shrunk.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "emulator/cuda_driver_functions.h"
#include "emulator/nccl/window_support.h"

namespace weightsync::emulator::nccl {
namespace {

// Two allocations side by side in one range of addresses.
class TwoPieces {
 public:
  explicit TwoPieces(int device) {
    const CUmemAllocationProp prop = {1, 1, {1, device}, nullptr, {}};
    const CUmemAccessDesc access = {{1, device}, 3};
    EXPECT_EQ(CUDA_SUCCESS,
              cuMemAddressReserve(&address_, 2 * kVmmGranularity, 0, 0, 0));
    for (const std::size_t at : {std::size_t{0}, kVmmGranularity}) {
      CUmemGenericAllocationHandle handle = 0;
      EXPECT_EQ(CUDA_SUCCESS, cuMemCreate(&handle, kVmmGranularity, &prop, 0));
      EXPECT_EQ(CUDA_SUCCESS, cuMemMap(address_ + at, kVmmGranularity, 0, handle, 0));
      EXPECT_EQ(CUDA_SUCCESS, cuMemRelease(handle));
    }
    EXPECT_EQ(CUDA_SUCCESS, cuMemSetAccess(address_, 2 * kVmmGranularity, &access, 1));
  }
  ~TwoPieces() {
    EXPECT_EQ(CUDA_SUCCESS, cuMemUnmap(address_, 2 * kVmmGranularity));
    EXPECT_EQ(CUDA_SUCCESS, cuMemAddressFree(address_, 2 * kVmmGranularity));
  }
  TwoPieces(const TwoPieces&) = delete;
  TwoPieces& operator=(const TwoPieces&) = delete;

  // It came as a number. NOLINTNEXTLINE(performance-no-int-to-ptr)
  std::byte* data() const { return reinterpret_cast<std::byte*>(address_); }

 private:
  CUdeviceptr address_ = 0;
};

ncclResult_t put_byte(const Rank& self, const void* source, ncclWindow_t window) {
  return ncclPutSignal(source, 1, ncclInt8, 0, window, 0, 0, 0, 0, self.communicator,
                       self.stream);
}

TEST(WindowMemory, a_window_over_several_allocations_is_registered_but_takes_no_puts) {
  as_threads(1, [](Rank& self) {
    const TestWindow usual(self, 64);
    const TwoPieces memory(self.device);
    ncclComm_t comm = self.communicator;
    const std::size_t both = kVmmGranularity + 8;
    ncclWindow_t window = nullptr;
    ASSERT_EQ(ncclSuccess,
              ncclCommWindowRegister(comm, memory.data(), both, &window, kSymmetric));
    void* found = nullptr;
    EXPECT_EQ(ncclSuccess, ncclWinGetUserPtr(comm, window, &found));
    EXPECT_EQ(memory.data(), found);
    EXPECT_EQ(ncclInvalidArgument, put_byte(self, usual.data(), window));
    EXPECT_EQ(ncclInvalidArgument, put_byte(self, memory.data(), usual.handle()));
    EXPECT_EQ(ncclSuccess, put_byte(self, usual.data(), usual.handle()));
    self.synchronize();
    EXPECT_EQ(ncclSuccess, ncclCommWindowDeregister(comm, window));
    // Over one of them it is like any other.
    ASSERT_EQ(ncclSuccess,
              ncclCommWindowRegister(comm, memory.data(), 64, &window, kSymmetric));
    EXPECT_EQ(ncclSuccess, put_byte(self, memory.data(), window));
    self.synchronize();
    EXPECT_EQ(ncclSuccess, ncclCommWindowDeregister(comm, window));
  });
}

TEST(WindowMemory, several_allocations_are_refused_where_that_is_switched_off) {
  const Setting off("NCCL_ELASTIC_BUFFER_REGISTER", "0");
  as_threads(1, [](Rank& self) {
    const TwoPieces memory(self.device);
    ncclWindow_t window = nullptr;
    EXPECT_EQ(ncclInvalidArgument,
              ncclCommWindowRegister(self.communicator, memory.data(),
                                     kVmmGranularity + 8, &window, kSymmetric));
    EXPECT_EQ(nullptr, window);
  });
}

TEST(WindowMemory, a_window_beyond_the_end_of_its_memory_is_a_cuda_error) {
  as_threads(1, [](Rank& self) {
    const DeviceBuffer memory(self.device, kVmmGranularity, Kind::kVmm);
    ncclWindow_t window = nullptr;
    EXPECT_EQ(ncclUnhandledCudaError,
              ncclCommWindowRegister(self.communicator, memory.data(),
                                     kVmmGranularity + 1, &window, kSymmetric));
    EXPECT_EQ(nullptr, window);
  });
}

TEST(WindowMemory, a_revoked_communicator_makes_no_windows_but_lets_go_of_its_own) {
  as_threads(1, [](Rank& self) {
    const DeviceBuffer memory(self.device, 8192, Kind::kVmm);
    ncclComm_t comm = self.communicator;
    ncclWindow_t before = nullptr;
    ncclWindow_t after = nullptr;
    ASSERT_EQ(ncclSuccess,
              ncclCommWindowRegister(comm, memory.data(), 8, &before, kSymmetric));
    ASSERT_EQ(ncclSuccess, ncclCommRevoke(comm, 0));
    EXPECT_EQ(ncclInternalError, ncclCommWindowRegister(comm, memory.data() + 4096, 8,
                                                        &after, kSymmetric));
    EXPECT_EQ(nullptr, after);
    void* found = nullptr;
    EXPECT_EQ(ncclSuccess, ncclWinGetUserPtr(comm, before, &found));
    EXPECT_EQ(memory.data(), found);
    EXPECT_EQ(ncclSuccess, ncclCommWindowDeregister(comm, before));
  });
}

TEST(WindowMemory, a_shrunk_communicator_has_no_windows_and_counts_from_zero) {
  Steps steps;
  as_threads(2, [&](Rank& self) {
    const TestWindow old(self, 64);
    const int peer = 1 - self.rank;
    EXPECT_EQ(ncclSuccess, send_signal(self, peer));  // surplus, lost with the parent
    self.synchronize();
    ASSERT_EQ(ncclSuccess, ncclCommRevoke(self.communicator, 0));
    Rank child = self;
    int excluded = 99;
    ASSERT_EQ(ncclSuccess, ncclCommShrink(self.communicator, &excluded, 1,
                                          &child.communicator, nullptr, 0));
    EXPECT_EQ(ncclInternalError, put_word(old, child, peer, 0, 1));
    {
      const TestWindow fresh(child, 64);
      fresh.word(0) = 3;
      meet(child);
      if (self.rank == 0) {
        steps.await(1);
        EXPECT_EQ(ncclSuccess, put_word(fresh, child, 1, 0, 1));
      } else {
        const OwnStream stream;
        EXPECT_EQ(ncclSuccess, wait_for(child, 0, 1, stream.get()));
        EXPECT_TRUE(stays_busy(stream));
        steps.reach(1);
        stream.synchronize();
        EXPECT_EQ(3U, fresh.word(1));
      }
      meet(child);
    }
    EXPECT_EQ(ncclSuccess, ncclCommDestroy(child.communicator));
  });
}

}  // namespace
}  // namespace weightsync::emulator::nccl
