#include "recorder/recorder.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace weightsync::recorder {
namespace {

Operation collective(const GroupPointer& group, std::int64_t number) {
  Operation made;
  made.name = "all_reduce";
  made.group = group;
  made.collective = number;
  return made;
}

Operation put(const GroupPointer& group) {
  Operation made;
  made.kind = Kind::kOneSided;
  made.name = "put";
  made.group = group;
  return made;
}

std::vector<std::int64_t> numbers(const std::vector<Operation>& operations) {
  std::vector<std::int64_t> all;
  for (const Operation& each : operations) all.push_back(each.collective);
  return all;
}

TEST(Recorder, KeepsTheLastOperationsInOrder) {
  Recorder recorder(3);
  const auto group = recorder.add_group("0", "default_pg", {0, 1}, 0);
  for (int number = 1; number <= 5; ++number)
    recorder.record(collective(group, number));

  const Snapshot taken = recorder.snapshot();

  EXPECT_EQ((std::vector<std::int64_t>{3, 4, 5}), numbers(taken.exchanges));
  EXPECT_EQ(2u, taken.exchanges.front().id);
  ASSERT_EQ(1u, taken.groups.size());
  EXPECT_EQ(5, taken.groups.front().enqueued);
}

TEST(Recorder, OneSidedCallsPushNoCollectiveOut) {
  Recorder recorder(2);
  const auto group = recorder.add_group("0", "", {0, 1}, 0);
  recorder.record(put(group));
  recorder.record(collective(group, 1));
  for (int each = 0; each < 10; ++each) recorder.record(put(group));

  const Snapshot taken = recorder.snapshot();

  EXPECT_EQ(std::vector<std::int64_t>{1}, numbers(taken.exchanges));
  EXPECT_EQ(0u, taken.exchanges.front().id);
  EXPECT_EQ(2u, taken.others.size());
}

TEST(Recorder, AnOperationIsFinishedOnce) {
  Recorder recorder(4);
  const auto group = recorder.add_group("0", "", {0}, 0);
  const Ticket first = recorder.record(collective(group, 1));
  const Ticket second = recorder.record(collective(group, 2));
  recorder.start(first);
  recorder.finish(first, State::kCompleted);
  recorder.finish(first, State::kFailed);
  recorder.start(first);
  recorder.finish(second, State::kFailed);

  const Snapshot taken = recorder.snapshot();

  EXPECT_EQ(State::kCompleted, taken.exchanges[0].state);
  EXPECT_LE(taken.exchanges[0].created_ns, taken.exchanges[0].started_ns);
  EXPECT_LE(taken.exchanges[0].started_ns, taken.exchanges[0].finished_ns);
  EXPECT_EQ(State::kFailed, taken.exchanges[1].state);
  EXPECT_EQ(0, taken.exchanges[1].started_ns);
  EXPECT_EQ(1, taken.groups.front().completed);
}

TEST(Recorder, AForgottenOperationIsNotFinishedInPlaceOfAnother) {
  Recorder recorder(1);
  const auto group = recorder.add_group("0", "", {0}, 0);
  const Ticket old = recorder.record(collective(group, 1));
  recorder.record(collective(group, 2));
  recorder.finish(old, State::kCompleted);

  EXPECT_EQ(State::kScheduled, recorder.snapshot().exchanges.front().state);
}

TEST(Recorder, RecordsNothingWithoutCapacity) {
  Recorder recorder(0);
  const auto group = recorder.add_group("0", "", {0}, 0);
  const Ticket ticket = recorder.record(collective(group, 1));
  recorder.finish(ticket, State::kCompleted);

  EXPECT_EQ(kNoTicket, ticket);
  EXPECT_TRUE(recorder.snapshot().exchanges.empty());
}

TEST(Recorder, AGroupStaysWhileAnOperationOfItIsKept) {
  Recorder recorder(2);
  auto kept = recorder.add_group("kept", "", {0}, 0);
  auto gone = recorder.add_group("gone", "", {0}, 0);
  recorder.record(collective(kept, 1));
  kept.reset();
  gone.reset();

  const Snapshot taken = recorder.snapshot();

  ASSERT_EQ(1u, taken.groups.size());
  EXPECT_EQ("kept", taken.groups.front().name);
}

TEST(Recorder, FramesAreDroppedWithTheirOperation) {
  Recorder recorder(1);
  const auto group = recorder.add_group("0", "", {0}, 0);
  const auto frames = std::make_shared<const int>(7);
  Operation first = collective(group, 1);
  first.frames = frames;
  recorder.record(std::move(first));
  EXPECT_EQ(2, frames.use_count());
  recorder.record(collective(group, 2));

  EXPECT_EQ(1, frames.use_count());
}

TEST(Recorder, ManyThreadsRecordAtOnceWhileDumpsAreTaken) {
  constexpr int kThreads = 4;
  constexpr int kEach = 2000;
  Recorder recorder(64);
  const auto group = recorder.add_group("0", "", {0}, 0);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&] {
      for (int each = 1; each <= kEach; ++each) {
        const std::int64_t size = 4;
        Operation operation = collective(group, each);
        operation.add(&size, 1, "Float", true);
        const Ticket ticket = recorder.record(std::move(operation));
        recorder.finish(ticket, State::kCompleted);
      }
    });
  }
  for (int each = 0; each < 20; ++each) {
    for (const Operation& found : recorder.snapshot().exchanges) {
      EXPECT_EQ(std::vector<std::int64_t>{4}, found.sizes);
    }
  }
  for (std::thread& thread : threads) thread.join();

  const Snapshot taken = recorder.snapshot();

  ASSERT_EQ(64u, taken.exchanges.size());
  EXPECT_EQ(std::uint64_t{kThreads * kEach - 1}, taken.exchanges.back().id);
  EXPECT_EQ(kEach, taken.groups.front().completed);
}

}  // namespace
}  // namespace weightsync::recorder
