#include "nccl/communicator.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "emulator/core.h"
#include "emulator/nccl/rank_support.h"
#include "shm/test_support.h"

namespace weightsync::nccl {
namespace {

using Pointer = Communicator::Pointer;
using emulator::nccl::DeviceBuffer;

std::shared_ptr<const Library> library() {
  return Library::of(::dlopen(nullptr, RTLD_NOW), "this program").take();
}

Communicator::Place place_of(int rank, int size) {
  return {rank, size, rank % emulator::device_count()};
}

// Runs `act` as each of the ranks of a communicator, which are threads.
void as_ranks(int size, const std::function<void(Pointer)>& act,
              const Config& config = {}) {
  const auto nccl = library();
  auto id = make_unique_id(*nccl);
  ASSERT_TRUE(id.ok());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      auto made = Communicator::create(nccl, id.value(), place_of(rank, size), config,
                                       shm::patience());
      ASSERT_TRUE(made.ok()) << made.status().message();
      ASSERT_TRUE(emulator::set_current_device(made.value()->device()).ok());
      act(made.take());
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// The sum over the ranks of their ranks plus one, or -1 if the call fails.
int summed(Communicator& communicator) {
  const DeviceBuffer buffer(communicator.device(), 4);
  const int mine = communicator.rank() + 1;
  std::memcpy(buffer.data(), &mine, 4);
  auto* const stream = reinterpret_cast<cudaStream_t>(2);
  const ncclResult_t called =
      communicator.library().ncclAllReduce(buffer.data(), buffer.data(), 1, ncclInt32,
                                           ncclSum, communicator.handle(), stream);
  if (called != ncclSuccess) return -1;
  emulator::stream_of(stream)->synchronize();
  int sum = 0;
  std::memcpy(&sum, buffer.data(), 4);
  return sum;
}

TEST(CommunicatorTest, RanksMeetAndComputeAndEnd) {
  as_ranks(3, [](Pointer it) {
    EXPECT_EQ(6, summed(*it));
    EXPECT_FALSE(it->gone());
    EXPECT_TRUE(it->async_error().ok());
    EXPECT_TRUE(it->destroy(shm::patience()).ok());
    EXPECT_TRUE(it->ended());
    EXPECT_TRUE(it->gone());
  });
}

TEST(CommunicatorTest, AnEndIsIdempotentAndNothingIsAskedAfterIt) {
  as_ranks(1, [](Pointer it) {
    EXPECT_TRUE(it->abort(shm::patience()).ok());
    EXPECT_TRUE(it->abort(shm::patience()).ok());
    EXPECT_TRUE(it->destroy(shm::patience()).ok());
    EXPECT_TRUE(it->revoke(shm::patience()).ok());
    EXPECT_TRUE(it->async_error().ok());
  });
}

TEST(CommunicatorTest, ARankThatNobodyMeetsGivesUpAtItsDeadline) {
  const auto nccl = library();
  auto id = make_unique_id(*nccl);
  const auto made =
      Communicator::create(nccl, id.value(), place_of(0, 2), {}, shm::soon());

  EXPECT_EQ(Code::kTimedOut, made.status().code());
  // Comes after all, so that nothing is left behind.
  (void)Communicator::create(nccl, id.value(), place_of(1, 2), {}, shm::patience());
}

TEST(CommunicatorTest, ADeviceThatIsNotThereIsAnError) {
  const auto nccl = library();
  auto id = make_unique_id(*nccl);
  const auto made =
      Communicator::create(nccl, id.value(), {0, 1, 1000}, {}, shm::patience());

  EXPECT_EQ(Code::kSystem, made.status().code());
}

TEST(CommunicatorTest, APartIsSplitOffAndTheOthersGetNone) {
  as_ranks(3, [](Pointer it) {
    const bool in = it->rank() != 1;
    const int rank = it->rank() / 2;
    auto part = it->split(in ? 0 : kNcclSplitNoColor, it->rank(),
                          {rank, 2, it->device()}, {}, shm::patience());
    ASSERT_TRUE(part.ok()) << part.status().message();
    EXPECT_EQ(in, part.value() != nullptr);
    if (in) {
      EXPECT_EQ(3, summed(*part.value()));
      EXPECT_TRUE(part.value()->destroy(shm::patience()).ok());
    }
    EXPECT_EQ(6, summed(*it));
    EXPECT_TRUE(it->destroy(shm::patience()).ok());
  });
}

TEST(CommunicatorTest, TheOthersGoOnWithoutTheExcluded) {
  as_ranks(3, [](Pointer it) {
    if (it->rank() != 1) {
      const int rank = it->rank() / 2;
      auto rest = it->shrink({1}, false, {rank, 2, it->device()}, {}, shm::patience());
      ASSERT_TRUE(rest.ok()) << rest.status().message();
      EXPECT_EQ(3, summed(*rest.value()));
      EXPECT_TRUE(rest.value()->destroy(shm::patience()).ok());
    }
    EXPECT_TRUE(it->abort(shm::patience()).ok());
  });
}

TEST(CommunicatorTest, ARevokedOneTakesNoOperationsAndEnds) {
  as_ranks(2, [](Pointer it) {
    EXPECT_TRUE(it->revoke(shm::patience()).ok());
    EXPECT_TRUE(it->revoke(shm::patience()).ok());
    EXPECT_EQ(-1, summed(*it));
    EXPECT_TRUE(it->abort(shm::patience()).ok());
  });
}

TEST(CommunicatorTest, AnAbortEndsWhatNobodyAnswers) {
  as_ranks(2, [](Pointer it) {
    if (it->rank() == 0) {
      const DeviceBuffer buffer(it->device(), 4);
      auto* const stream = reinterpret_cast<cudaStream_t>(2);
      EXPECT_EQ(ncclSuccess, it->library().ncclRecv(buffer.data(), 1, ncclInt32, 1,
                                                    it->handle(), stream));
      EXPECT_TRUE(it->abort(shm::patience()).ok());
      emulator::stream_of(stream)->synchronize();
    } else {
      EXPECT_TRUE(it->abort(shm::patience()).ok());
    }
    EXPECT_FALSE(it->quarantined());
  });
}

TEST(CommunicatorTest, WhoeverAsksForErrorsMayDoSoWhileItEnds) {
  as_ranks(1, [](Pointer it) {
    std::atomic<bool> over{false};
    std::thread asks([&] {
      while (!over) EXPECT_TRUE(it->async_error().ok());
    });
    EXPECT_TRUE(it->abort(shm::patience()).ok());
    over = true;
    asks.join();
  });
}

TEST(CommunicatorTest, AnEndWaitsForTheIssuerButNotForLong) {
  as_ranks(1, [](Pointer it) {
    const std::lock_guard<std::timed_mutex> issuing(it->issuing());
    EXPECT_TRUE(it->abort(shm::patience()).ok());
  });
}

TEST(ConfigTest, AFieldThatIsNotSetIsLeftToNccl) {
  const Config config;
  const ncclConfig_t made = as_nccl(config);

  EXPECT_EQ(offsetof(ncclConfig_t, maxP2pPeers), made.size);
  EXPECT_EQ(1, made.blocking);
  for (const int field :
       {made.cgaClusterSize, made.minCTAs, made.maxCTAs, made.CTAPolicy,
        made.splitShare, made.shrinkShare, made.trafficClass, made.collnetEnable,
        made.nvlsCTAs, made.nChannelsPerNetPeer, made.nvlinkCentricSched}) {
    EXPECT_EQ(kNcclUndefInt, field);
  }
  EXPECT_EQ(nullptr, made.netName);
  EXPECT_EQ(nullptr, made.commName);
}

TEST(ConfigTest, AFieldThatIsSetIsPassedOn) {
  Config config;
  config.cga_cluster_size = 2;
  config.min_ctas = 0;
  config.max_ctas = 16;
  config.split_share = 1;
  config.nvls_ctas = 3;
  config.net_name = "Socket";
  config.name = "weights";
  const ncclConfig_t made = as_nccl(config);

  EXPECT_EQ(2, made.cgaClusterSize);
  EXPECT_EQ(0, made.minCTAs);
  EXPECT_EQ(16, made.maxCTAs);
  EXPECT_EQ(1, made.splitShare);
  EXPECT_EQ(3, made.nvlsCTAs);
  EXPECT_STREQ("Socket", made.netName);
  EXPECT_STREQ("weights", made.commName);
}

TEST(ConfigTest, NcclRefusesOneThatCannotBe) {
  Config config;
  config.min_ctas = 8;
  config.max_ctas = 4;
  const auto nccl = library();
  auto id = make_unique_id(*nccl);
  const auto made =
      Communicator::create(nccl, id.value(), place_of(0, 1), config, shm::patience());

  EXPECT_EQ(Code::kInvalid, made.status().code());
}

}  // namespace
}  // namespace weightsync::nccl
