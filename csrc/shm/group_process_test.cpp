// Groups whose ranks are processes: deaths and forks.
#include "executor.h"
#include "group.h"
#include "test_support.h"

#if defined(__SANITIZE_THREAD__)
// A forked child may start threads: it inherits none that matter to the tests.
extern "C" const char* __tsan_default_options() { return "die_after_fork=0"; }
#endif

namespace weightsync::shm {
namespace {

// Rank 1 in a process of its own, which obeys its parent; rank 0 is the test.
class Pair : public testing::Test {
 protected:
  Pair() : child_([](const Channel& parent) { return serve(parent); }) {
    const std::string theirs = child_.channel().hear();
    const std::vector<std::string> handles{group_->handle(), theirs};
    child_.channel().say(group_->handle());
    const Status joined = group_->join(handles, 7, patience());
    EXPECT_TRUE(joined.ok()) << joined.message();
  }
  ~Pair() override { group_->leave("the test is over"); }

  static int serve(const Channel& parent) {
    const auto group = Group::create().take();
    parent.say(group->handle());
    const std::string theirs = parent.hear();
    if (!group->join({theirs, group->handle()}, 7, patience()).ok()) return 1;
    for (std::string order = parent.hear(); !order.empty(); order = parent.hear()) {
      parent.say(obey(*group, order));
    }
    return 0;
  }

  static std::string obey(Group& group, const std::string& order) {
    if (order == "signal") return group.signal(0, 1).message() + ".";
    if (order == "barrier") (void)group.barrier(patience());
    if (order == "leave") group.leave("ordered to");
    if (order == "wait")
      return group.block(*group.signals({{0, 1}}, patience())).message() + ".";
    return ".";
  }

  void order(const std::string& what) {
    child_.channel().say(what);
    EXPECT_EQ(".", child_.channel().hear()) << what;
  }

  Status await(std::uint64_t count) {
    return group_->block(*group_->signals({{1, count}}, patience()));
  }

  Child child_;
  const std::shared_ptr<Group> group_ = Group::create().take();
};

TEST_F(Pair, SignalsEachOther) {
  order("signal");

  EXPECT_TRUE(await(1).ok());
  ASSERT_TRUE(group_->signal(1, 1).ok());
  order("wait");
}

TEST_F(Pair, ADeathEndsWaitsAndIsNamed) {
  const auto started = group_->signals({{1, 1}}, patience());
  const auto barrier = group_->barrier(patience());
  ASSERT_TRUE(group_->start(started).ok());
  const std::string process = std::to_string(child_.pid());
  child_.kill();
  const Status outcome = await(1);

  EXPECT_EQ(Code::kPeer, outcome.code());
  EXPECT_EQ("waiting for signals: rank 1 (process " + process + ") died",
            outcome.message());
  EXPECT_EQ("barrier: rank 1 (process " + process + ") died",
            group_->block(*barrier).message());
  EXPECT_EQ(Code::kPeer, group_->block(*started).code());
  EXPECT_EQ(Code::kPeer, group_->check_peer(1).code());
  EXPECT_EQ(Code::kPeer, group_->exchange({}, patience()).status().code());
  EXPECT_EQ(Code::kPeer, group_->signal(1, 1).code());
}

TEST_F(Pair, WhatWasSentBeforeADeathStillCounts) {
  order("signal");
  order("signal");
  order("barrier");
  child_.kill();

  EXPECT_EQ(Code::kPeer, await(3).code());
  EXPECT_TRUE(await(1).ok());
  EXPECT_TRUE(await(1).ok());
  EXPECT_TRUE(group_->block(*group_->barrier(patience())).ok());
  EXPECT_EQ(Code::kPeer, await(1).code());
}

TEST_F(Pair, LeavingIsToldFromDying) {
  order("leave");
  child_.kill();
  child_.wait();
  const Status outcome = await(1);

  EXPECT_NE(std::string::npos, outcome.message().find("left the group"));
}

// Not within a test, where Run means testing::Test::Run.
std::shared_ptr<Job> idle_job() {
  return std::make_shared<Job>(std::vector<Run>(), 0, nullptr, [](const Status&) {});
}

TEST_F(Pair, AForkedChildHasNoPartInIt) {
  const auto executor = std::make_shared<Executor>();
  executor->submit(idle_job(), executor);
  auto wait = group_->signals({{1, 1}}, patience());
  ASSERT_TRUE(group_->start(wait).ok());
  Child forked([&](const Channel&) {
    executor->stop();
    group_->close("in a child");
    group_->leave("in a child");
    wait.reset();
    group_->~Group();
    return 0;
  });
  EXPECT_EQ(0, forked.wait_in_time());
  EXPECT_TRUE(group_->closed().ok());
  order("signal");
  EXPECT_TRUE(group_->block(*wait).ok()) << "the waiter lives";
  ASSERT_TRUE(group_->signal(1, 1).ok());
  order("wait");
  child_.kill();

  EXPECT_EQ(Code::kPeer, await(1).code()) << "the monitor lives";
  executor->stop();
}

TEST(GroupJoin, NamesAProcessThatIsGone) {
  Child child([](const Channel& parent) {
    parent.say(Group::create().take()->handle());
    return 0;
  });
  const std::string handle = child.channel().hear();
  child.wait();
  const auto group = Group::create().take();
  const Status joined = group->join({group->handle(), handle}, 7, patience());

  EXPECT_EQ(Code::kPeer, joined.code());
  EXPECT_NE(std::string::npos, joined.message().find("rank 1")) << joined.message();
}

TEST(GroupJoin, EndsWhenAPeerDiesBeforeItJoined) {
  Child child([](const Channel& parent) {
    const auto group = Group::create().take();
    parent.say(group->handle());
    parent.hear();
    return 0;
  });
  const auto group = Group::create().take();
  const std::vector<std::string> handles{group->handle(), child.channel().hear()};
  Status joined;
  std::thread joiner([&] { joined = group->join(handles, 7, patience()); });
  child.kill();
  joiner.join();

  EXPECT_EQ(Code::kPeer, joined.code());
  EXPECT_NE(std::string::npos, joined.message().find("rank 1")) << joined.message();
}

}  // namespace
}  // namespace weightsync::shm
