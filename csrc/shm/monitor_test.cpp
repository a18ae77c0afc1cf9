#include "monitor.h"

#include <future>
#include <mutex>

#include "test_support.h"

namespace weightsync::shm {
namespace {

int until_told(const Channel& parent) {
  parent.hear();
  return 0;
}

TEST(Monitor, ReportsADeathAtOnceAndOnce) {
  Child child(until_told);
  Monitor monitor;
  std::promise<int> dead;
  ASSERT_TRUE(monitor.watch(3, child.pid()).ok());
  ASSERT_TRUE(monitor.start([&](int peer) { dead.set_value(peer); }).ok());
  child.kill();

  EXPECT_EQ(3, dead.get_future().get());
}

TEST(Monitor, ReportsAnOrderlyExitToo) {
  Child child(until_told);
  Monitor monitor;
  std::promise<int> dead;
  ASSERT_TRUE(monitor.watch(1, child.pid()).ok());
  ASSERT_TRUE(monitor.start([&](int peer) { dead.set_value(peer); }).ok());
  child.channel().say("go");

  EXPECT_EQ(1, dead.get_future().get());
}

TEST(Monitor, ReportsADeathBeforeItStarted) {
  Child child(until_told);
  Monitor monitor;
  ASSERT_TRUE(monitor.watch(1, child.pid()).ok());
  child.kill();
  child.wait();
  std::promise<int> dead;
  ASSERT_TRUE(monitor.start([&](int peer) { dead.set_value(peer); }).ok());

  EXPECT_EQ(1, dead.get_future().get());
}

TEST(Monitor, TellsTheDeadFromTheLiving) {
  Child first(until_told);
  Child second(until_told);
  Child third(until_told);
  Monitor monitor;
  std::mutex mutex;
  std::vector<int> dead;
  std::promise<void> two;
  ASSERT_TRUE(monitor.watch(0, first.pid()).ok());
  ASSERT_TRUE(monitor.watch(1, second.pid()).ok());
  ASSERT_TRUE(monitor.watch(2, third.pid()).ok());
  ASSERT_TRUE(monitor
                  .start([&](int peer) {
                    const std::lock_guard<std::mutex> lock(mutex);
                    dead.push_back(peer);
                    if (dead.size() == 2) two.set_value();
                  })
                  .ok());
  third.kill();
  third.wait();
  first.kill();
  two.get_future().wait();
  monitor.stop();

  EXPECT_EQ((std::set<int>{0, 2}), std::set<int>(dead.begin(), dead.end()));
  EXPECT_EQ(2U, dead.size());
}

TEST(Monitor, RefusesAProcessThatIsGone) {
  Child child([](const Channel&) { return 0; });
  const pid_t pid = child.pid();
  child.wait();
  Monitor monitor;
  const Status watched = monitor.watch(5, pid);

  EXPECT_EQ(Code::kPeer, watched.code());
  EXPECT_NE(std::string::npos, watched.message().find("rank 5"));
  EXPECT_NE(std::string::npos, watched.message().find(std::to_string(pid)));
}

TEST(Monitor, NeedsNoDescriptorForItsOwnProcess) {
  const std::size_t descriptors = open_descriptors();
  Monitor monitor;
  ASSERT_TRUE(monitor.watch(0, ::getpid()).ok());
  ASSERT_TRUE(monitor.start([](int) { FAIL(); }).ok());

  EXPECT_EQ(descriptors, open_descriptors());
}

TEST(Monitor, ClosesItsDescriptors) {
  Child child(until_told);
  const std::size_t descriptors = open_descriptors();
  for (int i = 0; i < 50; ++i) {
    Monitor monitor;
    ASSERT_TRUE(monitor.watch(0, child.pid()).ok());
    if (i % 2 == 0) {
      ASSERT_TRUE(monitor.start([](int) { FAIL(); }).ok());
    }
    monitor.stop();
    monitor.stop();
  }

  EXPECT_EQ(descriptors, open_descriptors());
}

TEST(Monitor, IsNotEndedByAForkedChildThatDropsIt) {
  Child watched(until_told);
  Monitor monitor;
  std::promise<int> dead;
  ASSERT_TRUE(monitor.watch(3, watched.pid()).ok());
  ASSERT_TRUE(monitor.start([&](int peer) { dead.set_value(peer); }).ok());
  Child child([&](const Channel&) {
    monitor.stop();
    return 0;
  });
  EXPECT_EQ(0, child.wait_in_time());
  watched.kill();
  auto reported = dead.get_future();

  ASSERT_EQ(std::future_status::ready, reported.wait_until(patience()));
  EXPECT_EQ(3, reported.get());
}

}  // namespace
}  // namespace weightsync::shm
