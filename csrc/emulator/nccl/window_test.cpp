// Windows through the C ABI: table 1.1 of the contract and what follows from it.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>

#include "emulator/nccl/window_support.h"

namespace weightsync::emulator::nccl {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

ncclWindow_t something() { return reinterpret_cast<ncclWindow_t>(0x5); }

TEST(NcclWindow, a_handle_is_local_and_leads_to_the_buffer) {
  std::atomic<std::uintptr_t> handles[2]{};
  as_threads(2, [&](const Rank& rank) {
    const TestWindow window(rank, 100);
    handles[rank.rank] = reinterpret_cast<std::uintptr_t>(window.handle());
    void* found = nullptr;
    EXPECT_EQ(ncclSuccess,
              ncclWinGetUserPtr(rank.communicator, window.handle(), &found));
    EXPECT_EQ(window.data(), found);
    meet(rank);
  });

  EXPECT_NE(0U, handles[0].load());
  EXPECT_NE(handles[0].load(), handles[1].load());
}

TEST(NcclWindow, wrong_arguments_are_refused_in_order) {
  as_threads(1, [](const Rank& rank) {
    const DeviceBuffer memory(rank.device, 8192, Kind::kVmm);
    ncclWindow_t window = something();
    ncclComm_t comm = rank.communicator;
    EXPECT_EQ(ncclInvalidArgument,
              ncclCommWindowRegister(nullptr, memory.data(), 1, &window, kSymmetric));
    EXPECT_EQ(something(), window);
    EXPECT_EQ(ncclInvalidArgument,
              ncclCommWindowRegister(comm, memory.data(), 1, nullptr, kSymmetric));
    EXPECT_EQ(ncclInvalidArgument,
              ncclCommWindowRegister(comm, nullptr, 1, &window, kSymmetric));
    EXPECT_EQ(nullptr, window);
    window = something();
    EXPECT_EQ(ncclInvalidArgument,
              ncclCommWindowRegister(comm, memory.data(), 0, &window, kSymmetric));
    EXPECT_EQ(nullptr, window);
  });
}

TEST(NcclWindow, memory_that_is_not_virtual_is_a_cuda_error) {
  as_threads(1, [](const Rank& rank) {
    const DeviceBuffer plain(rank.device, 8192, Kind::kMalloc);
    const DeviceBuffer pinned(rank.device, 8192, Kind::kHost);
    ncclComm_t comm = rank.communicator;
    int mine = 0;
    for (void* const each :
         {static_cast<void*>(plain.data()), static_cast<void*>(pinned.data()),
          static_cast<void*>(&mine)}) {
      ncclWindow_t window = something();
      EXPECT_EQ(ncclUnhandledCudaError,
                ncclCommWindowRegister(comm, each, 4, &window, kSymmetric));
      EXPECT_EQ(nullptr, window);
    }
  });
}

TEST(NcclWindow, a_window_starts_at_a_page_of_its_allocation) {
  as_threads(1, [](const Rank& rank) {
    const DeviceBuffer memory(rank.device, 65536, Kind::kVmm);
    ncclWindow_t window = nullptr;
    ncclComm_t comm = rank.communicator;
    EXPECT_EQ(ncclInvalidArgument, ncclCommWindowRegister(comm, memory.data() + 2048, 8,
                                                          &window, kSymmetric));
    EXPECT_EQ(nullptr, window);
    EXPECT_EQ(ncclSuccess, ncclCommWindowRegister(comm, memory.data() + 4096, 3,
                                                  &window, kSymmetric));
    EXPECT_EQ(ncclSuccess, ncclCommWindowDeregister(comm, window));
  });
}

TEST(NcclWindow, unknown_flags_are_accepted) {
  as_threads(1, [](const Rank& rank) {
    const DeviceBuffer memory(rank.device, 8192, Kind::kVmm);
    ncclWindow_t window = nullptr;
    EXPECT_EQ(ncclSuccess, ncclCommWindowRegister(rank.communicator, memory.data(), 8,
                                                  &window, 0x4000));
    EXPECT_NE(nullptr, window);
  });
}

TEST(NcclWindow, without_symmetric_support_it_succeeds_and_is_null) {
  const Setting off("NCCL_WIN_ENABLE", "0");
  as_threads(2, [](const Rank& rank) {
    const DeviceBuffer memory(rank.device, 8192, Kind::kVmm);
    ncclWindow_t window = something();
    ncclComm_t comm = rank.communicator;
    EXPECT_EQ(ncclSuccess,
              ncclCommWindowRegister(comm, memory.data(), 8, &window, kSymmetric));
    EXPECT_EQ(nullptr, window);
    void* found = memory.data();
    EXPECT_EQ(ncclSuccess, ncclWinGetUserPtr(comm, window, &found));
    EXPECT_EQ(nullptr, found);
    EXPECT_EQ(ncclSuccess, ncclCommWindowDeregister(comm, window));
    EXPECT_EQ(ncclInvalidArgument, send_signal(rank, 0));
  });
}

TEST(NcclWindow, a_handle_is_deregistered_once) {
  as_threads(1, [](const Rank& rank) {
    const DeviceBuffer memory(rank.device, 8192, Kind::kVmm);
    ncclComm_t comm = rank.communicator;
    EXPECT_EQ(ncclSuccess, ncclCommWindowDeregister(comm, nullptr));
    EXPECT_EQ(ncclInternalError, ncclCommWindowDeregister(comm, something()));
    EXPECT_EQ(ncclInvalidArgument, ncclCommWindowDeregister(nullptr, nullptr));
    ncclWindow_t window = nullptr;
    ASSERT_EQ(ncclSuccess,
              ncclCommWindowRegister(comm, memory.data(), 8, &window, kSymmetric));
    EXPECT_EQ(ncclSuccess, ncclCommWindowDeregister(comm, window));
    EXPECT_EQ(ncclInternalError, ncclCommWindowDeregister(comm, window));
    void* found = nullptr;
    EXPECT_EQ(ncclInternalError, ncclWinGetUserPtr(comm, window, &found));
    EXPECT_EQ(ncclInvalidArgument, ncclWinGetUserPtr(comm, nullptr, &found));
    EXPECT_EQ(ncclInvalidArgument, ncclWinGetUserPtr(nullptr, window, &found));
  });
}

TEST(NcclWindow, in_a_group_the_handle_comes_at_its_end) {
  as_threads(2, [](const Rank& rank) {
    const DeviceBuffer memory(rank.device, 8192, Kind::kVmm);
    ncclWindow_t windows[2] = {something(), something()};
    ncclComm_t comm = rank.communicator;
    ncclGroupStart();
    EXPECT_EQ(ncclSuccess,
              ncclCommWindowRegister(comm, memory.data(), 8, &windows[0], kSymmetric));
    EXPECT_EQ(ncclSuccess, ncclCommWindowRegister(comm, memory.data() + 4096, 8,
                                                  &windows[1], kSymmetric));
    EXPECT_EQ(nullptr, windows[0]);
    EXPECT_EQ(ncclSuccess, ncclGroupEnd());
    EXPECT_NE(nullptr, windows[0]);
    EXPECT_NE(windows[0], windows[1]);
    meet(rank);
  });
}

TEST(NcclWindow, a_failure_in_a_group_registers_nothing) {
  as_threads(1, [](const Rank& rank) {
    const DeviceBuffer memory(rank.device, 8192, Kind::kVmm);
    ncclWindow_t window = something();
    ncclComm_t comm = rank.communicator;
    ncclGroupStart();
    EXPECT_EQ(ncclSuccess,
              ncclCommWindowRegister(comm, memory.data(), 8, &window, kSymmetric));
    EXPECT_EQ(ncclInvalidArgument, send_signal(rank, 7));
    EXPECT_EQ(ncclInvalidArgument, ncclGroupEnd());
    EXPECT_EQ(nullptr, window);
  });
}

TEST(NcclWindow, the_address_space_of_a_rank_runs_out) {
  const Setting stride("NCCL_WIN_STRIDE", "1");  // rounded up to 4 GiB
  as_threads(1, [](const Rank& rank) {
    const DeviceBuffer memory(rank.device, 2048 * kMiB, Kind::kVmm);
    ncclComm_t comm = rank.communicator;
    ncclWindow_t windows[3] = {};
    // Each takes its whole allocation, however small it is.
    EXPECT_EQ(ncclSuccess,
              ncclCommWindowRegister(comm, memory.data(), 8, &windows[0], kSymmetric));
    EXPECT_EQ(ncclInternalError, ncclCommWindowRegister(comm, memory.data() + 4096, 8,
                                                        &windows[1], kSymmetric));
    EXPECT_EQ(ncclSuccess, ncclCommWindowDeregister(comm, windows[0]));
    EXPECT_EQ(ncclSuccess, ncclCommWindowRegister(comm, memory.data() + 4096, 8,
                                                  &windows[2], kSymmetric));
  });
}

TEST(NcclWindow, sizes_may_differ_and_the_whole_allocation_is_reached) {
  as_threads(2, [](const Rank& rank) {
    const TestWindow source(rank, 64);
    const DeviceBuffer memory(rank.device, 65536, Kind::kVmm);
    ncclWindow_t window = nullptr;
    const std::size_t nbytes = rank.rank == 0 ? 60000 : 8;
    ASSERT_EQ(ncclSuccess, ncclCommWindowRegister(rank.communicator, memory.data(),
                                                  nbytes, &window, 0));
    if (rank.rank == 0) {
      source.word(0) = 42;
      // Within the local window, far beyond the peer's.
      EXPECT_EQ(ncclSuccess, ncclPutSignal(source.data(), 8, ncclInt8, 1, window, 50000,
                                           0, 0, 0, rank.communicator, rank.stream));
    } else {
      EXPECT_EQ(ncclSuccess, wait_for(rank, 0, 1));
      rank.synchronize();
      std::uint64_t found = 0;
      std::memcpy(&found, memory.data() + 50000, sizeof found);
      EXPECT_EQ(42U, found);
    }
    meet(rank);
  });
}

void register_at(const Rank& rank, std::size_t offset, ncclResult_t expected) {
  const DeviceBuffer memory(rank.device, 65536, Kind::kVmm);
  ncclWindow_t window = nullptr;
  EXPECT_EQ(expected, ncclCommWindowRegister(rank.communicator, memory.data() + offset,
                                             8, &window, kSymmetric));
  meet(rank);
}

TEST(NcclWindow, the_target_is_computed_from_the_offset_of_the_local_window) {
  as_threads(2, [](const Rank& rank) {
    const DeviceBuffer memory(rank.device, 65536, Kind::kVmm);
    ncclWindow_t window = nullptr;
    // Rank 1's window lies elsewhere in its allocation; rank 0 does not know.
    const std::size_t offset = rank.rank == 0 ? 4096 : 8192;
    ASSERT_EQ(ncclSuccess,
              ncclCommWindowRegister(rank.communicator, memory.data() + offset, 4096,
                                     &window, kSymmetric));
    if (rank.rank == 0) {
      memory.data()[4096] = std::byte{7};
      EXPECT_EQ(ncclSuccess, ncclPutSignal(memory.data() + 4096, 1, ncclInt8, 1, window,
                                           0, 0, 0, 0, rank.communicator, rank.stream));
    } else {
      EXPECT_EQ(ncclSuccess, wait_for(rank, 0, 1));
      rank.synchronize();
      EXPECT_EQ(std::byte{7}, memory.data()[4096]);
      EXPECT_EQ(std::byte{0}, memory.data()[8192]);
    }
    meet(rank);
  });
}

TEST(NcclWindow, strictness_refuses_different_offsets_on_every_rank) {
  const Setting strict("WEIGHTSYNC_EMULATOR_STRICT", "1");
  as_threads(2, [](const Rank& rank) {
    register_at(rank, rank.rank == 0 ? 4096 : 8192, ncclInvalidArgument);
    register_at(rank, 4096, ncclSuccess);
  });
}

TEST(NcclWindow, strictness_refuses_overlap_on_every_rank) {
  const Setting strict("WEIGHTSYNC_EMULATOR_STRICT", "1");
  as_threads(2, [](const Rank& rank) {
    const DeviceBuffer memory(rank.device, 65536, Kind::kVmm);
    ncclComm_t comm = rank.communicator;
    ncclWindow_t window = nullptr;
    EXPECT_EQ(ncclSuccess,
              ncclCommWindowRegister(comm, memory.data(), 8192, &window, kSymmetric));
    EXPECT_EQ(ncclInvalidArgument, ncclCommWindowRegister(comm, memory.data() + 4096, 8,
                                                          &window, kSymmetric));
    meet(rank);
  });
}

TEST(NcclWindow, windows_do_not_carry_over_to_another_communicator) {
  as_threads(2, [](const Rank& rank) {
    const TestWindow window(rank, 64);
    Rank child = rank;
    ASSERT_EQ(ncclSuccess, ncclCommSplit(rank.communicator, 0, rank.rank,
                                         &child.communicator, nullptr));
    EXPECT_EQ(ncclInternalError, put_word(window, child, 0, 0, 1));
    EXPECT_EQ(ncclSuccess, ncclCommDestroy(child.communicator));
    meet(rank);
  });
}

}  // namespace
}  // namespace weightsync::emulator::nccl
