#include "event.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <string>

#include "queued_stream.h"
#include "shm/test_support.h"

namespace weightsync::emulator {
namespace {

using shm::becomes_true;

std::shared_ptr<QueuedStream> new_stream() {
  const auto order = [](QueuedStream&, const QueuedStream::Put& put) { put({}); };
  const auto failed = [](int, const std::string&) {};
  return std::make_shared<QueuedStream>(StreamTraits{0, "stream", 0, 0}, order, failed);
}

class EventTest : public testing::Test {
 protected:
  ~EventTest() override {
    gate_ = true;
    for (const auto& stream : {first_, second_}) {
      stream->synchronize();
      stream->close();
    }
  }
  void block(QueuedStream& stream) {
    stream.enqueue("gate", [this] {
      while (!gate_) std::this_thread::yield();
    });
  }

  std::atomic<bool> gate_{false};
  std::shared_ptr<QueuedStream> first_ = new_stream();
  std::shared_ptr<QueuedStream> second_ = new_stream();
  std::shared_ptr<Event> event_ = Event::create(0, 0).take();
};

TEST_F(EventTest, AnEventThatWasNeverRecordedIsReached) {
  event_->wait_on(*first_);
  event_->synchronize();

  EXPECT_TRUE(event_->is_reached());
  EXPECT_FALSE(event_->is_recorded());
  EXPECT_TRUE(first_->is_idle());
}

TEST_F(EventTest, AStreamWaitsForThePointOfAnother) {
  std::atomic<bool> ran{false};
  block(*first_);
  event_->record(*first_);
  event_->wait_on(*second_);
  second_->enqueue("after", [&] { ran = true; });

  EXPECT_FALSE(event_->is_reached());
  EXPECT_FALSE(ran);
  gate_ = true;
  second_->synchronize();
  EXPECT_TRUE(ran);
  EXPECT_TRUE(event_->is_reached());
}

TEST_F(EventTest, RecordingAgainDoesNotMoveAWait) {
  std::atomic<bool> ran{false};
  block(*first_);
  event_->record(*first_);
  event_->wait_on(*second_);
  second_->enqueue("after", [&] { ran = true; });
  const auto third = new_stream();
  event_->record(*third);
  third->synchronize();

  EXPECT_TRUE(event_->is_reached());
  EXPECT_FALSE(ran);
  gate_ = true;
  second_->synchronize();
  EXPECT_TRUE(ran);
  third->close();
}

TEST_F(EventTest, MeasuresTheTimeBetweenPoints) {
  const auto end = Event::create(0, 0).take();
  event_->record(*first_);
  first_->enqueue("sleep",
                  [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
  end->record(*first_);
  end->synchronize();

  EXPECT_GE(Event::elapsed(*event_, *end), 20.0);
  EXPECT_LT(Event::elapsed(*event_, *end), 20'000.0);
}

TEST_F(EventTest, AnotherProcessWaitsForAnInterprocessEvent) {
  constexpr unsigned kFlags = cudaEventInterprocess | cudaEventDisableTiming;
  const auto shared = Event::create(0, kFlags).take();
  const shm::Locator locator = shared->locator();
  int ends[2] = {};
  ASSERT_EQ(0, ::pipe(ends));
  block(*first_);
  shared->record(*first_);
  const pid_t child = ::fork();
  if (child == 0) {
    auto opened = Event::open(0, locator);
    if (!opened.ok()) ::_exit(1);
    if (opened.value()->is_reached()) ::_exit(2);
    (void)!::write(ends[1], "w", 1);
    opened.value()->synchronize();
    ::_exit(opened.value()->is_reached() ? 42 : 3);
  }
  char waits = ' ';
  ::close(ends[1]);
  EXPECT_EQ(1, ::read(ends[0], &waits, 1));
  ::close(ends[0]);
  gate_ = true;
  int status = 0;
  ASSERT_EQ(child, ::waitpid(child, &status, 0));

  EXPECT_EQ(42, WEXITSTATUS(status));
}

TEST_F(EventTest, WhatIsNoEventIsNotOpened) {
  const auto segment = shm::Segment::create(100, shm::Populate::kNo).take();

  EXPECT_FALSE(Event::open(0, segment->locator()).ok());
}

}  // namespace
}  // namespace weightsync::emulator
