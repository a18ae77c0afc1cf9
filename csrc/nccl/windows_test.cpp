#include "nccl/windows.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <future>
#include <thread>
#include <vector>

#include "emulator/core.h"
#include "emulator/nccl/rank_support.h"
#include "shm/test_support.h"

namespace weightsync::nccl {
namespace {

using emulator::Kind;
using emulator::nccl::DeviceBuffer;
using Words = Windows::Words;

constexpr std::size_t kBytes = std::size_t{2} << 20;

cudaStream_t stream() { return reinterpret_cast<cudaStream_t>(2); }

void synchronize() { emulator::stream_of(stream())->synchronize(); }

using Act = std::function<void(Communicator&, const std::shared_ptr<Windows>&)>;

// Runs `act` as each of the ranks of a communicator, which are threads.
void as_ranks(int size, const Act& act) {
  const auto library = Library::of(::dlopen(nullptr, RTLD_NOW), "this program").take();
  auto id = make_unique_id(*library);
  ASSERT_TRUE(id.ok());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      const Communicator::Place place{rank, size, rank % emulator::device_count()};
      auto made = Communicator::create(library, id.value(), place, {}, shm::patience());
      ASSERT_TRUE(made.ok()) << made.status().message();
      ASSERT_TRUE(emulator::set_current_device(place.device).ok());
      auto windows = std::make_shared<Windows>(made.value());
      act(*made.value(), windows);
      synchronize();
      EXPECT_TRUE(made.value()->destroy(shm::patience()).ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void put(Communicator& from, const Windows::Round& round, int peer,
         const std::byte* source, std::size_t offset) {
  EXPECT_EQ(ncclSuccess,
            from.library().ncclPutSignal(source, 1, ncclUint8, peer, round.handle,
                                         offset, 0, 0, 0, from.handle(), stream()));
}

void take_signals(Communicator& at, int peer, int count) {
  ncclWaitSignalDesc_t expected{count, peer, 0, 0};
  EXPECT_EQ(ncclSuccess,
            at.library().ncclWaitSignal(1, &expected, at.handle(), stream()));
  synchronize();
}

TEST(WindowsTest, EveryRankHearsWhatEveryRankSays) {
  as_ranks(3, [](Communicator& it, const auto& windows) {
    for (std::int64_t turn = 0; turn < 2; ++turn) {
      const Words mine{it.rank(), turn, 2, 3, 4, -5};
      auto all = windows->exchange(mine, stream(), shm::patience());
      ASSERT_TRUE(all.ok()) << all.status().message();
      ASSERT_EQ(3U, all.value().size());
      for (std::int64_t rank = 0; rank < 3; ++rank) {
        const Words expected{rank, turn, 2, 3, 4, -5};
        EXPECT_EQ(expected, all.value()[static_cast<std::size_t>(rank)]);
      }
    }
  });
}

TEST(WindowsTest, AfterTheWarmUpOneRankPutsAlone) {
  as_ranks(2, [](Communicator& it, const auto& windows) {
    const DeviceBuffer memory(it.device(), kBytes, Kind::kVmm);
    ASSERT_TRUE(windows->add(memory.data(), kBytes, shm::patience()).ok());
    ASSERT_TRUE(windows->warm_up(stream(), shm::patience()).ok());
    EXPECT_EQ(0, windows->round_of(memory.data()));
    memory.data()[0] = std::byte{7};
    if (it.rank() == 0) put(it, windows->round(0), 1, memory.data(), 100);
    if (it.rank() == 1) {
      take_signals(it, 0, 1);
      EXPECT_EQ(std::byte{7}, memory.data()[100]);
    }
    synchronize();
    ASSERT_TRUE(windows->exchange({}, stream(), shm::patience()).ok());
    EXPECT_TRUE(windows->forget(memory.data()));
  });
}

TEST(WindowsTest, ARankWithNothingNewFillsIn) {
  as_ranks(2, [](Communicator& it, const auto& windows) {
    const DeviceBuffer memory(it.device(), kBytes, Kind::kVmm);
    void* base = memory.data();
    if (it.rank() == 0) base = windows->fill_in(kBytes).take();
    ASSERT_TRUE(windows->add(base, kBytes, shm::patience()).ok());
    EXPECT_EQ(it.rank() == 0 ? -1 : 0, windows->round_of(memory.data()));
    EXPECT_EQ(1, windows->rounds());
    ASSERT_TRUE(windows->exchange({}, stream(), shm::patience()).ok());
    EXPECT_TRUE(windows->forget(memory.data()));
  });
}

TEST(WindowsTest, WhatIsForgottenIsNoRoundAnyMore) {
  as_ranks(1, [](Communicator& it, const auto& windows) {
    const DeviceBuffer memory(it.device(), kBytes, Kind::kVmm);
    ASSERT_TRUE(windows->add(memory.data(), kBytes, shm::patience()).ok());
    EXPECT_TRUE(windows->forget(memory.data()));
    EXPECT_TRUE(windows->forget(memory.data()));
    EXPECT_EQ(-1, windows->round_of(memory.data()));
    EXPECT_EQ(nullptr, windows->round(0).handle);
    EXPECT_EQ(nullptr, windows->round(1).handle);
    EXPECT_EQ(nullptr, windows->round(-1).handle);
    // The address counts again when it is registered again.
    ASSERT_TRUE(windows->add(memory.data(), kBytes, shm::patience()).ok());
    EXPECT_EQ(1, windows->round_of(memory.data()));
    EXPECT_TRUE(windows->forget(memory.data()));
  });
}

TEST(WindowsTest, AfterTheEndNothingIsMadeAndEverythingIsForgotten) {
  as_ranks(1, [](Communicator& it, const auto& windows) {
    const DeviceBuffer memory(it.device(), kBytes, Kind::kVmm);
    ASSERT_TRUE(windows->add(memory.data(), kBytes, shm::patience()).ok());
    ASSERT_TRUE(it.destroy(shm::patience()).ok());
    EXPECT_EQ(Code::kClosed,
              windows->add(memory.data(), kBytes, shm::patience()).code());
    EXPECT_EQ(Code::kClosed,
              windows->exchange({}, stream(), shm::patience()).status().code());
    EXPECT_EQ(Code::kClosed, windows->warm_up(stream(), shm::patience()).code());
    EXPECT_TRUE(windows->forget(memory.data()));
  });
}

TEST(WindowsTest, OrdinaryMemoryIsAnError) {
  as_ranks(1, [](Communicator& it, const auto& windows) {
    const DeviceBuffer memory(it.device(), kBytes);
    EXPECT_EQ(Code::kSystem,
              windows->add(memory.data(), kBytes, shm::patience()).code());
    EXPECT_EQ(-1, windows->round_of(memory.data()));
    EXPECT_EQ(1, windows->rounds());
  });
}

TEST(WindowsTest, ARankThatNobodyMeetsGivesUpAtItsDeadline) {
  std::promise<void> given_up;
  std::promise<void> come;
  as_ranks(2, [&](Communicator& it, const auto& windows) {
    if (it.rank() == 0) {
      EXPECT_EQ(Code::kTimedOut,
                windows->exchange({}, stream(), shm::soon()).status().code());
      given_up.set_value();
      come.get_future().wait();
    } else {
      // Comes after all, so that nothing is left behind.
      given_up.get_future().wait();
      EXPECT_TRUE(windows->exchange({}, stream(), shm::patience()).ok());
      come.set_value();
    }
  });
}

}  // namespace
}  // namespace weightsync::nccl
