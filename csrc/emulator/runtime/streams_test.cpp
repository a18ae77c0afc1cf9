#include "streams.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <vector>

#include "shm/test_support.h"

namespace weightsync::emulator {
namespace {

using shm::becomes_true;

// What holds a stream until it is opened.
class Gate {
 public:
  void open() { open_ = true; }
  void pass() const {
    while (!open_) std::this_thread::yield();
  }
  bool is_entered() const { return entered_; }
  std::function<void()> operation() {
    return [this] {
      entered_ = true;
      pass();
    };
  }

 private:
  std::atomic<bool> open_{false};
  std::atomic<bool> entered_{false};
};

// Streams live as long as the process, as those of the machine do.
Streams& new_streams() {
  static std::vector<std::unique_ptr<Streams>> kept;
  kept.push_back(std::make_unique<Streams>(2, [](int, const std::string&) {}));
  return *kept.back();
}

class StreamsTest : public testing::Test {
 protected:
  Streams& streams_ = new_streams();
};

TEST_F(StreamsTest, RunsOperationsInOrderAndNotAtTheCall) {
  const auto stream = streams_.create(0, cudaStreamNonBlocking, 0);
  Gate gate;
  std::vector<int> order;
  stream->enqueue("first", gate.operation());
  for (int each = 0; each < 3; ++each) {
    stream->enqueue("next", [&order, each] { order.push_back(each); });
  }
  EXPECT_FALSE(stream->is_idle());
  EXPECT_TRUE(order.empty());
  gate.open();
  stream->synchronize();

  EXPECT_EQ((std::vector<int>{0, 1, 2}), order);
  EXPECT_TRUE(stream->is_idle());
}

TEST_F(StreamsTest, AMarkRunsInTheCallWhereNothingIsBeforeIt) {
  const auto stream = streams_.create(0, cudaStreamNonBlocking, 0);
  bool ran = false;
  stream->mark("mark", [&] { ran = true; });

  EXPECT_TRUE(ran);
}

TEST_F(StreamsTest, AMarkComesAfterWhatIsBeforeItOnAnyStream) {
  const auto fallback = streams_.find(nullptr, 0);
  const auto blocking = streams_.create(0, 0, 0);
  Gate gate;
  std::atomic<int> ran{0};
  fallback->enqueue("gate", gate.operation());
  fallback->mark("after the gate", [&] { ++ran; });
  blocking->mark("after the default stream", [&] { ++ran; });
  EXPECT_EQ(0, ran);
  gate.open();
  blocking->synchronize();
  fallback->synchronize();

  EXPECT_EQ(2, ran);
}

TEST_F(StreamsTest, ABlockingStreamWaitsForTheDefaultStream) {
  const auto fallback = streams_.find(nullptr, 0);
  const auto blocking = streams_.create(0, 0, 0);
  Gate gate;
  std::atomic<bool> ran{false};
  fallback->enqueue("gate", gate.operation());
  blocking->enqueue("after", [&] { ran = true; });
  ASSERT_TRUE(becomes_true([&] {
    const auto report = blocking->report();
    return report && report->note == "device 0, default stream";
  }));
  EXPECT_FALSE(ran);
  gate.open();
  blocking->synchronize();

  EXPECT_TRUE(ran);
}

TEST_F(StreamsTest, TheDefaultStreamWaitsForBlockingStreams) {
  const auto fallback = streams_.find(cudaStreamLegacy, 0);
  const auto blocking = streams_.create(0, 0, 0);
  Gate gate;
  std::atomic<bool> ran{false};
  blocking->enqueue("gate", gate.operation());
  fallback->enqueue("after", [&] { ran = true; });
  ASSERT_TRUE(becomes_true([&] { return gate.is_entered(); }));
  EXPECT_FALSE(ran);
  gate.open();
  fallback->synchronize();

  EXPECT_TRUE(ran);
}

TEST_F(StreamsTest, ANonBlockingStreamAndOtherDevicesDoNotWait) {
  const auto free = streams_.create(0, cudaStreamNonBlocking, 0);
  const auto other = streams_.create(1, 0, 0);
  Gate gate;
  streams_.find(nullptr, 0)->enqueue("gate", gate.operation());
  free->enqueue("free", [] {});
  other->enqueue("other", [] {});
  free->synchronize();
  other->synchronize();

  EXPECT_FALSE(streams_.find(nullptr, 0)->is_idle());
  gate.open();
  streams_.synchronize(0);
}

TEST_F(StreamsTest, ADestroyedStreamStillRunsWhatIsQueued) {
  auto stream = streams_.create(0, cudaStreamNonBlocking, 0);
  cudaStream_t const handle = stream->handle();
  Gate gate;
  std::atomic<bool> ran{false};
  stream->enqueue("gate", gate.operation());
  stream->enqueue("last", [&] { ran = true; });

  EXPECT_TRUE(streams_.destroy(handle));
  EXPECT_FALSE(streams_.destroy(handle));
  EXPECT_EQ(nullptr, streams_.find(handle, 0));
  stream.reset();
  EXPECT_EQ(2U, streams_.of_device(0).size());
  gate.open();
  EXPECT_TRUE(becomes_true([&] { return ran.load(); }));
  EXPECT_TRUE(becomes_true([&] { return streams_.of_device(0).size() == 1; }));
}

TEST_F(StreamsTest, EachThreadHasADefaultStreamOfItsOwn) {
  const auto here = streams_.find(cudaStreamPerThread, 0);
  std::shared_ptr<QueuedStream> there;
  std::thread([&] { there = streams_.find(cudaStreamPerThread, 0); }).join();

  EXPECT_EQ(here, streams_.find(cudaStreamPerThread, 0));
  EXPECT_NE(here, there);
}

TEST_F(StreamsTest, SaysWhatAStreamIsBlockedOn) {
  const auto stream = streams_.create(1, cudaStreamNonBlocking, 0);
  Gate gate;
  std::atomic<bool> noted{false};
  stream->enqueue("ncclRecv", [&] {
    set_operation_note("rank 3", "train.py:12");
    noted = true;
    gate.pass();
  });
  stream->enqueue("behind", [] {});
  ASSERT_TRUE(becomes_true([&] { return noted.load(); }));
  const auto reports = streams_.reports();
  gate.open();
  stream->synchronize();

  ASSERT_EQ(1U, reports.size());
  EXPECT_EQ("ncclRecv", reports[0].operation);
  EXPECT_EQ("rank 3", reports[0].note);
  EXPECT_EQ("train.py:12", reports[0].call_site);
  EXPECT_EQ(1U, reports[0].queued);
  EXPECT_EQ(1, reports[0].device);
  EXPECT_EQ(stream->name(), reports[0].stream);
}

TEST_F(StreamsTest, ManyThreadsEnqueueOnManyStreams) {
  constexpr int kThreads = 4;
  constexpr int kOperations = 200;
  std::atomic<int> count{0};
  std::vector<std::thread> threads;
  for (int each = 0; each < kThreads; ++each) {
    threads.emplace_back([&, each] {
      const auto stream = streams_.create(0, each % 2, 0);
      for (int operation = 0; operation < kOperations; ++operation) {
        stream->enqueue("count", [&] { ++count; });
        if (operation % 50 == 0) streams_.find(nullptr, 0)->enqueue("count", [] {});
      }
      streams_.destroy(stream->handle());
    });
  }
  for (std::thread& thread : threads) thread.join();
  streams_.synchronize(0);

  EXPECT_TRUE(becomes_true([&] { return count == kThreads * kOperations; }));
}

}  // namespace
}  // namespace weightsync::emulator
