#include "executor.h"

#include <future>

#include "test_support.h"

namespace weightsync::shm {
namespace {

constexpr std::size_t kBig = std::size_t{8} << 20;

// An executor whose thread can be held up by a job that waits for open().
struct Desk {
  Executor executor;
  std::promise<void> gate;
  std::promise<void> reached;

  void open() { gate.set_value(); }
};

std::shared_ptr<Job> job(std::function<void(Status)> done,
                         std::function<Status()> after = nullptr) {
  return std::make_shared<Job>(std::vector<Run>(), 0, std::move(after),
                               std::move(done));
}

// Returns when the executor's thread is inside a job, and stays there until open().
void hold_up(const std::shared_ptr<Desk>& desk) {
  desk->executor.submit(job([raw = desk.get()](const Status&) {
                          raw->reached.set_value();
                          raw->gate.get_future().wait();
                        }),
                        desk);
  desk->reached.get_future().wait();
}

// A job that copies for minutes unless it is cancelled.
class Endless {
 public:
  std::shared_ptr<Job> job(std::function<void(Status)> done,
                           std::function<Status()> after = nullptr) {
    const Run run{source_.data(), target_.data(), 1, kBig, 0, 0};
    return std::make_shared<Job>(std::vector<Run>(100'000, run), kBig, std::move(after),
                                 std::move(done));
  }

 private:
  std::vector<std::byte> source_ = std::vector<std::byte>(kBig);
  std::vector<std::byte> target_ = std::vector<std::byte>(kBig);
};

TEST(Job, CopiesThenSignalsThenTells) {
  const std::vector<std::byte> source(100, std::byte{3});
  std::vector<std::byte> target(100);
  std::string order;
  Job copy(
      {{source.data(), target.data(), 1, 100, 0, 0}}, 100,
      [&] {
        order += source == target ? "signal" : "early";
        return Status();
      },
      [&](const Status& outcome) { order += outcome.ok() ? " told" : " failed"; });
  copy.run();

  EXPECT_EQ("signal told", order);
}

TEST(Job, TellsWhatFollowsTheCopy) {
  Code told = Code::kOk;
  job([&](const Status& outcome) { told = outcome.code(); },
      [] { return Status(Code::kPeer, "died"); })
      ->run();

  EXPECT_EQ(Code::kPeer, told);
}

TEST(Job, DoesNotSignalWhenCancelled) {
  bool signalled = false;
  Code told = Code::kOk;
  const auto cancelled = job([&](const Status& outcome) { told = outcome.code(); },
                             [&] {
                               signalled = true;
                               return Status();
                             });
  cancelled->cancel();
  cancelled->run();

  EXPECT_FALSE(signalled);
  EXPECT_EQ(Code::kCancelled, told);
}

TEST(Job, DropsWhatItHeldWhenItRan) {
  const auto held = std::make_shared<int>(0);
  const auto kept = job([held](const Status&) {}, [held] { return Status(); });
  EXPECT_EQ(3, held.use_count());
  kept->run();

  EXPECT_EQ(1, held.use_count());
}

TEST(Executor, RunsJobsInOrderOnOneThread) {
  const auto desk = std::make_shared<Desk>();
  std::vector<int> order;
  std::set<std::thread::id> threads;
  std::promise<void> last;
  for (int i = 0; i < 100; ++i) {
    desk->executor.submit(job([&, i](const Status&) {
                            order.push_back(i);
                            threads.insert(std::this_thread::get_id());
                            if (i == 99) last.set_value();
                          }),
                          desk);
  }
  last.get_future().wait();
  desk->executor.stop();

  ASSERT_EQ(100U, order.size());
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
  EXPECT_EQ(1U, threads.size());
  EXPECT_EQ(0U, threads.count(std::this_thread::get_id()));
}

TEST(Executor, RunsOnTheCallerWhenNothingIsQueued) {
  Executor executor;
  std::thread::id ran;
  executor.run_or_submit(job([&](const Status&) { ran = std::this_thread::get_id(); }));

  EXPECT_EQ(std::this_thread::get_id(), ran);
}

TEST(Executor, QueuesBehindWhatIsThere) {
  const auto desk = std::make_shared<Desk>();
  hold_up(desk);
  std::promise<std::thread::id> ran;
  desk->executor.run_or_submit(
      job([&](const Status&) { ran.set_value(std::this_thread::get_id()); }));
  desk->open();

  EXPECT_NE(std::this_thread::get_id(), ran.get_future().get());
  desk->executor.stop();
}

TEST(Executor, RunsWithinAJobWhatAJobBrings) {
  const auto desk = std::make_shared<Desk>();
  std::promise<bool> inner_ran;
  desk->executor.submit(job([&, raw = desk.get()](const Status&) {
                          bool ran = false;
                          raw->executor.run_or_submit(
                              job([&](const Status& inner) { ran = inner.ok(); }));
                          inner_ran.set_value(ran);
                        }),
                        desk);

  EXPECT_TRUE(inner_ran.get_future().get());
  desk->executor.stop();
}

TEST(Executor, SkipsAQueuedJobThatIsCancelled) {
  const auto desk = std::make_shared<Desk>();
  hold_up(desk);
  Endless endless;
  std::promise<Code> told;
  const auto queued =
      endless.job([&](const Status& outcome) { told.set_value(outcome.code()); });
  desk->executor.submit(queued, desk);
  queued->cancel();
  desk->open();

  EXPECT_EQ(Code::kCancelled, told.get_future().get());
  desk->executor.stop();
}

TEST(Executor, InterruptsTheJobThatRuns) {
  const auto desk = std::make_shared<Desk>();
  Endless endless;
  std::promise<Code> told;
  const auto running =
      endless.job([&](const Status& outcome) { told.set_value(outcome.code()); });
  desk->executor.submit(running, desk);
  running->cancel();

  EXPECT_EQ(Code::kCancelled, told.get_future().get());
  desk->executor.stop();
}

TEST(Executor, StopCancelsAllAndWaits) {
  const auto desk = std::make_shared<Desk>();
  Endless endless;
  std::vector<Code> told;
  for (int i = 0; i < 3; ++i) {
    desk->executor.submit(
        endless.job([&](const Status& outcome) { told.push_back(outcome.code()); }),
        desk);
  }
  desk->executor.stop();
  desk->executor.stop();

  EXPECT_EQ(std::vector<Code>(3, Code::kCancelled), told);
}

TEST(Executor, StopCancelsAndAwaitsAJobOnItsCallersThread) {
  Executor executor;
  Endless endless;
  std::atomic<bool> told{false};
  std::promise<void> begun;
  std::thread caller([&] {
    begun.set_value();
    executor.run_or_submit(endless.job(
        [&](const Status& outcome) { told = outcome.code() == Code::kCancelled; }));
  });
  begun.get_future().wait();
  executor.stop();
  caller.join();

  EXPECT_TRUE(told);
}

TEST(Executor, CancelsWhatComesAfterStop) {
  const auto desk = std::make_shared<Desk>();
  desk->executor.stop();
  std::vector<Code> told;
  Endless endless;
  const auto tell = [&](const Status& outcome) { told.push_back(outcome.code()); };
  desk->executor.submit(endless.job(tell), desk);
  desk->executor.run_or_submit(endless.job(tell));

  EXPECT_EQ(std::vector<Code>(2, Code::kCancelled), told);
}

TEST(Executor, MayBeStoppedByItsOwnJob) {
  auto desk = std::make_shared<Desk>();
  const std::weak_ptr<Desk> owner = desk;
  std::promise<void> stopped;
  desk->executor.submit(job([&, raw = desk.get()](const Status&) {
                          raw->executor.stop();
                          stopped.set_value();
                        }),
                        desk);
  stopped.get_future().wait();
  desk.reset();

  EXPECT_TRUE(becomes_true([&] { return owner.expired(); }));
}

TEST(Executor, StopsWhileThreadsBringJobs) {
  for (int round = 0; round < (kSanitized ? 20 : 100); ++round) {
    const auto desk = std::make_shared<Desk>();
    std::atomic<int> told{0};
    on_every_rank(4, [&](int rank) {
      if (rank == 0) return desk->executor.stop();
      for (int i = 0; i < 50; ++i) {
        const auto brought = job([&](const Status&) { ++told; });
        if (i % 2 == 0) {
          desk->executor.submit(brought, desk);
        } else {
          desk->executor.run_or_submit(brought);
        }
      }
    });
    desk->executor.stop();

    ASSERT_EQ(150, told);
  }
}

TEST(Executor, IsDroppedInAForkedChild) {
  auto desk = std::make_shared<Desk>();
  std::promise<void> ran;
  desk->executor.submit(job([&](const Status&) { ran.set_value(); }), desk);
  ran.get_future().wait();
  Child child([&](const Channel&) {
    desk->executor.stop();
    desk->executor.~Executor();
    return 0;
  });

  EXPECT_EQ(0, child.wait_in_time());
  desk->executor.stop();
}

}  // namespace
}  // namespace weightsync::shm
