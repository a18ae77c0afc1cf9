#include "wait.h"

#include <algorithm>

#include "test_support.h"

namespace weightsync::shm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

std::string nothing() { return "timed out"; }

// A counter somebody raises, the bell he rings, and a wait for it to reach a number.
struct Mailbox {
  Doorbell bell{};
  std::atomic<std::uint64_t> count{0};

  void raise() {
    count.fetch_add(1, std::memory_order_release);
    bell.ring();
  }
  std::shared_ptr<Wait> reaches(std::uint64_t target, Deadline deadline = patience()) {
    return std::make_shared<Wait>(
        [this, target]() -> std::optional<Status> {
          if (count.load(std::memory_order_acquire) < target) return std::nullopt;
          return Status();
        },
        nothing, deadline);
  }
};

TEST(Deadlines, OfAnyLengthDoNotOverflow) {
  EXPECT_EQ(Deadline::max(), after(milliseconds::max()));
  EXPECT_EQ(Deadline::max(), after(std::chrono::hours(24 * 365 * 1000)));
  EXPECT_LT(Clock::now() + seconds(9), after(seconds(10)));
  EXPECT_GE(Clock::now(), after(milliseconds(0)));
}

TEST(Wait, IsOpenUntilItsConditionHolds) {
  Mailbox box;
  const auto wait = box.reaches(1);

  EXPECT_FALSE(wait->poll());
  box.raise();
  EXPECT_TRUE(wait->poll());
  EXPECT_TRUE(wait->outcome().ok());
}

TEST(Wait, LooksNoMoreOnceItIsFinished) {
  int looks = 0;
  Wait wait(
      [&]() -> std::optional<Status> {
        ++looks;
        return Status(Code::kPeer, "died");
      },
      nothing, patience());

  for (int i = 0; i < 3; ++i) EXPECT_TRUE(wait.poll());
  wait.complete(Status());

  EXPECT_EQ(1, looks);
  EXPECT_EQ(Code::kPeer, wait.outcome().code());
}

TEST(Wait, LooksOnceMoreBeforeItTimesOut) {
  Mailbox box;
  box.raise();
  const auto late = box.reaches(1, Clock::now() - seconds(1));
  const auto missed = box.reaches(2, Clock::now() - seconds(1));

  EXPECT_TRUE(late->poll());
  EXPECT_TRUE(late->outcome().ok());
  EXPECT_TRUE(missed->poll());
  EXPECT_EQ(Code::kTimedOut, missed->outcome().code());
  EXPECT_EQ("timed out", missed->outcome().message());
}

TEST(Wait, CallsEachCallbackOnce) {
  Mailbox box;
  const auto wait = box.reaches(1);
  int early = 0;
  int late = 0;
  wait->on_finish([&] { ++early; });
  wait->on_finish([&] { ++early; });
  EXPECT_EQ(0, early);
  box.raise();
  wait->poll();
  wait->poll();
  wait->complete({Code::kCancelled, ""});
  wait->on_finish([&] { ++late; });

  EXPECT_EQ(2, early);
  EXPECT_EQ(1, late);
}

TEST(Wait, DropsItsCallbacksWhenTheyRan) {
  Mailbox box;
  const auto wait = box.reaches(1);
  auto held = std::make_shared<int>(1);
  wait->on_finish([held] {});
  box.raise();
  wait->poll();

  EXPECT_EQ(1, held.use_count());
}

TEST(Wait, MayBeAskedFromItsCallback) {
  Mailbox box;
  const auto wait = box.reaches(1);
  Code seen = Code::kOk;
  wait->on_finish([&] {
    seen = wait->outcome().code();
    wait->on_finish([&] { wait->poll(); });
  });
  wait->complete({Code::kCancelled, "given up"});

  EXPECT_EQ(Code::kCancelled, seen);
}

TEST(Wait, BringsItsDeadlineForwardButNeverBack) {
  Mailbox box;
  const auto wait = box.reaches(1, patience());
  const Deadline sooner = after(seconds(1));
  wait->limit(sooner);
  wait->limit(patience());

  EXPECT_EQ(sooner, wait->deadline());
}

TEST(Wait, IsFinishedExactlyOnceHoweverManyTry) {
  for (int round = 0; round < 200; ++round) {
    Mailbox box;
    std::atomic<int> called{0};
    const auto wait = box.reaches(1);
    wait->on_finish([&] { ++called; });
    on_every_rank(3, [&](int rank) {
      if (rank == 0) wait->complete({Code::kCancelled, ""});
      if (rank == 1) box.raise();
      wait->poll();
    });

    ASSERT_EQ(1, called);
  }
}

TEST(BlockOn, ReturnsAtTheDeadline) {
  Mailbox box;
  const Deadline begin = Clock::now();
  const auto wait = box.reaches(1, begin + milliseconds(30));

  EXPECT_EQ(Code::kTimedOut, block_on(*wait, box.bell).code());
  EXPECT_LE(begin + milliseconds(30), Clock::now());
}

TEST(BlockOn, WakesWhenCompletedFromAnotherThread) {
  Mailbox box;
  const auto wait = box.reaches(1);
  std::thread other([&] {
    wait->complete({Code::kCancelled, "given up"});
    box.bell.ring();
  });

  EXPECT_EQ(Code::kCancelled, block_on(*wait, box.bell).code());
  other.join();
}

TEST(BlockOn, WakesEveryThreadThatWaits) {
  Mailbox box;
  std::atomic<int> woken{0};
  std::thread raiser([&] {
    for (int i = 0; i < 4; ++i) box.raise();
  });
  on_every_rank(4, [&](int rank) {
    const auto wait = box.reaches(static_cast<std::uint64_t>(rank) + 1);
    if (block_on(*wait, box.bell).ok()) ++woken;
  });
  raiser.join();

  EXPECT_EQ(4, woken);
}

// A wake-up that is lost would let a wait sleep to its deadline, 20 s later.
TEST(BlockOn, LosesNoWakeUp) {
  constexpr std::uint64_t kRounds = kSanitized ? 5'000 : 100'000;
  Mailbox ping;
  Mailbox pong;
  Clock::duration longest{};
  std::thread other([&] {
    for (std::uint64_t i = 1; i <= kRounds; ++i) {
      if (!block_on(*ping.reaches(i), ping.bell).ok()) return;
      pong.raise();
    }
  });
  for (std::uint64_t i = 1; i <= kRounds; ++i) {
    const Deadline begin = Clock::now();
    ping.raise();
    const auto answered = pong.reaches(i);
    ASSERT_TRUE(block_on(*answered, pong.bell).ok());
    longest = std::max(longest, Clock::now() - begin);
  }
  other.join();

  EXPECT_GT(seconds(10), longest);
}

struct Watch {
  Mailbox box;
  Waiter waiter{box.bell};
};

void flag_of(Wait& wait, std::atomic<bool>& flag) {
  wait.on_finish([&flag] { flag = true; });
}

TEST(Waiter, FinishesAWaitWhenTheBellRings) {
  const auto watch = std::make_shared<Watch>();
  const auto wait = watch->box.reaches(1);
  std::atomic<bool> done{false};
  flag_of(*wait, done);
  ASSERT_TRUE(watch->waiter.add(wait, watch).ok());
  watch->box.raise();
  ASSERT_TRUE(becomes_true([&] { return done.load(); }));

  EXPECT_TRUE(done);
  EXPECT_TRUE(wait->outcome().ok());
  watch->waiter.stop();
}

TEST(Waiter, FinishesAWaitAtItsDeadline) {
  const auto watch = std::make_shared<Watch>();
  const auto later = watch->box.reaches(1, patience());
  const auto first = watch->box.reaches(1, soon());
  std::atomic<bool> done{false};
  flag_of(*first, done);
  ASSERT_TRUE(watch->waiter.add(later, watch).ok());
  ASSERT_TRUE(watch->waiter.add(first, watch).ok());
  ASSERT_TRUE(becomes_true([&] { return done.load(); }));

  EXPECT_EQ(Code::kTimedOut, first->outcome().code());
  EXPECT_FALSE(later->poll());
  watch->waiter.stop();
}

TEST(Waiter, StopLooksOnceMoreAndLeavesWaitsOpen) {
  const auto watch = std::make_shared<Watch>();
  std::atomic<bool> closing{false};
  const auto ends = std::make_shared<Wait>(
      [&]() -> std::optional<Status> {
        if (!closing) return std::nullopt;
        return Status(Code::kClosed, "closing");
      },
      nothing, patience());
  const auto open = watch->box.reaches(1);
  ASSERT_TRUE(watch->waiter.add(ends, watch).ok());
  ASSERT_TRUE(watch->waiter.add(open, watch).ok());
  closing = true;
  watch->waiter.stop();
  watch->waiter.stop();

  EXPECT_EQ(Code::kClosed, ends->outcome().code());
  EXPECT_FALSE(open->poll());
  open->complete({Code::kCancelled, ""});
  EXPECT_EQ(Code::kCancelled, open->outcome().code());
}

TEST(Waiter, AddedToAfterStopItLooksAtOnce) {
  const auto watch = std::make_shared<Watch>();
  watch->waiter.stop();
  watch->box.raise();
  const auto wait = watch->box.reaches(1);
  std::atomic<bool> done{false};
  flag_of(*wait, done);
  ASSERT_TRUE(watch->waiter.add(wait, watch).ok());

  EXPECT_TRUE(done);
}

TEST(Waiter, MayBeStoppedByItsOwnThread) {
  auto watch = std::make_shared<Watch>();
  const std::weak_ptr<Watch> gone = watch;
  const auto wait = watch->box.reaches(1);
  std::atomic<bool> done{false};
  wait->on_finish([&done, raw = watch.get()] {
    raw->waiter.stop();
    done = true;
  });
  ASSERT_TRUE(watch->waiter.add(wait, watch).ok());
  watch->box.raise();
  ASSERT_TRUE(becomes_true([&] { return done.load(); }));
  watch.reset();

  EXPECT_TRUE(done);
  EXPECT_TRUE(becomes_true([&] { return gone.expired(); }));
}

TEST(Waiter, KeepsItsOwnerUntilItStops) {
  auto watch = std::make_shared<Watch>();
  const std::weak_ptr<Watch> owner = watch;
  Watch* const raw = watch.get();
  ASSERT_TRUE(watch->waiter.add(watch->box.reaches(1), watch).ok());
  watch.reset();
  EXPECT_FALSE(owner.expired());
  {
    const auto again = owner.lock();
    raw->waiter.stop();
  }

  EXPECT_TRUE(owner.expired());
}

TEST(Waiter, FinishesAllWhileThreadsAddAndRaise) {
  constexpr int kEach = kSanitized ? 100 : 1'000;
  const auto watch = std::make_shared<Watch>();
  std::atomic<int> finished{0};
  on_every_rank(4, [&](int rank) {
    for (int i = 1; i <= kEach; ++i) {
      if (rank < 2) {
        watch->box.raise();
        continue;
      }
      const auto wait = watch->box.reaches(static_cast<std::uint64_t>(i));
      wait->on_finish([&] { ++finished; });
      EXPECT_TRUE(watch->waiter.add(wait, watch).ok());
    }
  });
  watch->waiter.stop();

  EXPECT_EQ(2 * kEach, finished);
}

}  // namespace
}  // namespace weightsync::shm
