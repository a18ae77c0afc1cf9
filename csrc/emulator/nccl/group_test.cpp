#include "emulator/nccl/group.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "emulator/nccl/comm.h"
#include "emulator/nccl/config_support.h"
#include "emulator/nccl/rank_support.h"
#include "emulator/nccl/window_support.h"

namespace weightsync::emulator::nccl {
namespace {

// An operation that tells what becomes of it.
class Told : public Operation {
 public:
  Told(std::string name, Phase phase, std::vector<std::string>& log, std::mutex& mutex)
      : name_(std::move(name)), phase_(phase), log_(log), mutex_(mutex) {}

  Phase phase() const override { return phase_; }
  std::string describe() const override { return name_; }
  Outcome prepare(Communicator&) override { return prepared; }
  Outcome run(Execution& execution) override {
    if (body) body(execution);
    const std::lock_guard lock(mutex_);
    log_.push_back(name_);
    return {};
  }

  Outcome prepared;
  std::function<void(Execution&)> body;

 private:
  const std::string name_;
  const Phase phase_;
  std::vector<std::string>& log_;
  std::mutex& mutex_;
};

class GroupTest : public testing::Test {
 protected:
  void SetUp() override {
    const ncclUniqueId id = new_unique_id();
    ASSERT_EQ(ncclSuccess, ncclCommInitRank(&handle_, 1, id, 0));
    communicator_ = Communicator::find(handle_);
  }
  void TearDown() override {
    communicator_ = nullptr;
    EXPECT_EQ(ncclSuccess, ncclCommDestroy(handle_));
  }

  std::shared_ptr<Told> told(const std::string& name, Phase phase) {
    return std::make_shared<Told>(name, phase, log_, mutex_);
  }
  ncclResult_t add(const std::shared_ptr<Told>& operation, int stream = 2) {
    return call({"a test", nullptr}, [&] {
      return add_operation(communicator_, operation,
                           reinterpret_cast<cudaStream_t>(stream));
    });
  }
  std::vector<std::string> log() {
    communicator_->synchronize();
    const std::lock_guard lock(mutex_);
    return log_;
  }

  ncclComm_t handle_ = nullptr;
  std::shared_ptr<Communicator> communicator_;
  std::mutex mutex_;
  std::vector<std::string> log_;
};

TEST_F(GroupTest, AnEndWithoutAStartIsInvalidUsage) {
  EXPECT_EQ(ncclInvalidUsage, ncclGroupEnd());
  EXPECT_EQ(ncclInvalidUsage, ncclGroupSimulateEnd(nullptr));
  EXPECT_EQ(ncclSuccess, ncclGroupStart());
  EXPECT_EQ(ncclSuccess, ncclGroupEnd());
}

TEST_F(GroupTest, OnlyTheOutermostEndExecutesAndByPhase) {
  ncclGroupStart();
  ncclGroupStart();
  add(told("send", Phase::kPointToPoint));
  add(told("reduce", Phase::kCollective));
  add(told("put", Phase::kOneSided));
  const ncclResult_t inner = ncclGroupEnd();
  const std::vector<std::string> before = log();
  const ncclResult_t outer = ncclGroupEnd();

  EXPECT_EQ(ncclSuccess, inner);
  EXPECT_TRUE(before.empty());
  EXPECT_EQ(ncclSuccess, outer);
  EXPECT_EQ((std::vector<std::string>{"put", "reduce", "send"}), log());
}

TEST_F(GroupTest, AFailingCallDropsTheGroupAndTheNextOneStartsClean) {
  ncclGroupStart();
  add(told("first", Phase::kCollective));
  int value = 0;
  const ncclResult_t bad = ncclCommCount(nullptr, &value);
  const ncclResult_t end = ncclGroupEnd();
  const ncclResult_t after = add(told("second", Phase::kCollective));

  EXPECT_EQ(ncclInvalidArgument, bad);
  EXPECT_EQ(ncclInvalidArgument, end);
  EXPECT_EQ(ncclSuccess, after);
  EXPECT_EQ((std::vector<std::string>{"second"}), log());
}

TEST_F(GroupTest, AFailingPreparationDropsAllOperations) {
  const auto failing = told("failing", Phase::kCollective);
  failing->prepared = {ncclInvalidUsage, "a test wants it"};
  ncclGroupStart();
  add(told("first", Phase::kOneSided));
  add(failing);

  EXPECT_EQ(ncclInvalidUsage, ncclGroupEnd());
  EXPECT_TRUE(log().empty());
}

TEST_F(GroupTest, OperationsRunOneAfterTheOtherWhateverTheirStreams) {
  std::atomic<bool> release{false};
  const auto slow = told("slow", Phase::kOneSided);
  slow->body = [&](Execution&) {
    while (!release) std::this_thread::yield();
  };
  add(slow, 2);
  add(told("behind", Phase::kOneSided), 1);  // another stream
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  {
    const std::lock_guard lock(mutex_);
    EXPECT_TRUE(log_.empty());
  }
  release = true;

  EXPECT_EQ((std::vector<std::string>{"slow", "behind"}), log());
}

TEST_F(GroupTest, AllStreamsOfAGroupWaitForItsOperations) {
  std::atomic<bool> release{false};
  const auto slow = told("slow", Phase::kCollective);
  slow->body = [&](Execution&) {
    while (!release) std::this_thread::yield();
  };
  ncclGroupStart();
  add(slow, 2);
  add(told("other", Phase::kCollective), 1);
  EXPECT_EQ(ncclSuccess, ncclGroupEnd());
  const auto first = stream_of(reinterpret_cast<cudaStream_t>(2));
  const bool idle = first->is_idle();
  release = true;
  first->synchronize();

  EXPECT_FALSE(idle);
  EXPECT_EQ((std::vector<std::string>{"slow", "other"}), log_);
}

TEST_F(GroupTest, ASimulationLaunchesNothing) {
  ncclSimInfo_t info{sizeof info, kNcclSimInfoMagic, kNcclVersion, -1.0F};
  ncclGroupStart();
  add(told("simulated", Phase::kCollective));
  const ncclResult_t simulated = ncclGroupSimulateEnd(&info);
  info.magic = 0;
  ncclGroupStart();
  const ncclResult_t bad = ncclGroupSimulateEnd(&info);

  EXPECT_EQ(ncclSuccess, simulated);
  EXPECT_LE(0.0F, info.estimatedTime);
  EXPECT_EQ(ncclInvalidArgument, bad);
  EXPECT_TRUE(log().empty());
}

TEST_F(GroupTest, ASimulationWithoutInfoIsAnEnd) {
  ncclGroupStart();
  add(told("real", Phase::kCollective));

  EXPECT_EQ(ncclSuccess, ncclGroupSimulateEnd(nullptr));
  EXPECT_EQ((std::vector<std::string>{"real"}), log());
}

TEST_F(GroupTest, AStreamOfAnotherDeviceIsRefused) {
  const int mine = current_device();
  ASSERT_TRUE(set_current_device(mine + 1).ok());
  const OwnStream foreign;
  ASSERT_TRUE(set_current_device(mine).ok());
  const auto add_to = [&](cudaStream_t stream) {
    return call({"a test", nullptr}, [&] {
      return add_operation(communicator_, told("foreign", Phase::kCollective), stream);
    });
  };

  EXPECT_EQ(ncclUnhandledCudaError, add_to(foreign.get()));
  EXPECT_TRUE(log().empty());
  // The default stream has one handle for all devices, and means the communicator's.
  ASSERT_TRUE(set_current_device(mine + 1).ok());
  EXPECT_EQ(ncclSuccess, add_to(nullptr));
  ASSERT_TRUE(set_current_device(mine).ok());
  EXPECT_EQ((std::vector<std::string>{"foreign"}), log());
}

TEST_F(GroupTest, BlockingAndNonblockingDoNotMix) {
  const ncclUniqueId id = new_unique_id();
  ncclConfig_t config = nonblocking_config();
  ncclComm_t other = nullptr;
  ncclGroupStart();
  add(told("blocking", Phase::kCollective));
  const ncclResult_t mixed = ncclCommInitRankConfig(&other, 1, id, 0, &config);
  const ncclResult_t end = ncclGroupEnd();

  EXPECT_EQ(ncclInvalidArgument, mixed);
  EXPECT_EQ(ncclInvalidArgument, end);
  EXPECT_EQ(nullptr, other);
  EXPECT_TRUE(log().empty());
}

TEST(NonblockingGroupTest, TheEndIsInProgressAndCallsAreRefusedUntilThen) {
  const ncclUniqueId id = new_unique_id();
  ncclConfig_t config = nonblocking_config();
  ncclComm_t communicators[2] = {};
  ncclGroupStart();
  for (int rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(set_current_device(rank).ok());
    EXPECT_EQ(ncclInProgress,
              ncclCommInitRankConfig(&communicators[rank], 2, id, rank, &config));
  }
  ASSERT_TRUE(set_current_device(0).ok());
  const ncclResult_t end = ncclGroupEnd();

  EXPECT_EQ(ncclInProgress, end);
  for (ncclComm_t each : communicators) {
    EXPECT_EQ(ncclSuccess, poll(each));
    EXPECT_EQ(ncclSuccess, ncclCommDestroy(each));
  }
}

TEST(NonblockingGroupTest, AnExplicitGroupOfInitsFailsAsAWhole) {
  const ncclUniqueId id = new_unique_id();
  ncclComm_t communicators[2] = {};
  ncclGroupStart();
  for (int rank = 0; rank < 2; ++rank) {  // both on device 0
    EXPECT_EQ(ncclSuccess, ncclCommInitRank(&communicators[rank], 2, id, rank));
  }

  EXPECT_EQ(ncclInvalidUsage, ncclGroupEnd());
  EXPECT_EQ(nullptr, communicators[0]);
  EXPECT_EQ(nullptr, communicators[1]);
}

}  // namespace
}  // namespace weightsync::emulator::nccl
