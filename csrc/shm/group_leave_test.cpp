// How a group ends, and what is left of it then: nothing.
#include "group.h"

#include <future>

#include "test_support.h"

namespace weightsync::shm {
namespace {

bool says(const Status& status, const std::string& text) {
  return status.message().find(text) != std::string::npos;
}

Status signals_from(Group& group, int peer, std::uint64_t count,
                    Deadline deadline = patience()) {
  const auto wait = group.signals({{peer, count}}, deadline);
  return group.block(*wait);
}

TEST(Group, APeerThatLeavesEndsEveryWaitForIt) {
  const Groups groups = formed_groups(3);
  ASSERT_TRUE(groups[1]->signal(0, 2).ok());
  const auto lost = groups[0]->signals({{2, 1}, {1, 3}}, patience());
  const auto barrier = groups[0]->barrier(patience());
  std::promise<void> told;
  lost->on_finish([&] { told.set_value(); });
  ASSERT_TRUE(groups[0]->start(lost).ok());
  groups[1]->leave("over");
  told.get_future().wait();

  EXPECT_EQ(Code::kPeer, lost->outcome().code());
  EXPECT_TRUE(says(lost->outcome(), "rank 1 (process ")) << lost->outcome().message();
  EXPECT_TRUE(says(lost->outcome(), "left the group"));
  EXPECT_EQ(Code::kPeer, groups[0]->block(*barrier).code());
  EXPECT_EQ(Code::kPeer, groups[0]->check_peer(1).code());
  EXPECT_EQ(Code::kPeer, groups[0]->signal(1, 1).code());
  EXPECT_EQ(Code::kOk, groups[0]->check_peer(2).code());
  EXPECT_TRUE(signals_from(*groups[0], 1, 2).ok()) << "sent before it left";
  EXPECT_EQ(Code::kPeer, signals_from(*groups[0], 1, 1).code());
  leave(groups);
}

TEST(Group, ABarrierEnteredBeforeLeavingCounts) {
  const Groups groups = formed_groups(2);
  const auto theirs = groups[1]->barrier(patience());
  groups[1]->leave("over");
  const auto mine = groups[0]->barrier(patience());

  EXPECT_TRUE(groups[0]->block(*mine).ok());
  leave(groups);
}

TEST(Group, LeavingEndsItsOwnWaitsAndMayBeRepeated) {
  const Groups groups = formed_groups(2);
  ASSERT_TRUE(groups[1]->signal(0, 1).ok());
  const auto started = groups[0]->signals({{1, 2}}, patience());
  std::atomic<int> told{0};
  started->on_finish([&] { ++told; });
  ASSERT_TRUE(groups[0]->start(started).ok());
  std::thread blocked([&] {
    const Status outcome = signals_from(*groups[0], 1, 5);
    EXPECT_EQ(Code::kClosed, outcome.code());
    EXPECT_EQ("first", outcome.message());
  });
  on_every_rank(3, [&](int) { groups[0]->leave("first"); });
  groups[0]->leave("second");
  blocked.join();

  EXPECT_EQ(1, told);
  EXPECT_EQ(Code::kClosed, started->outcome().code());
  EXPECT_EQ("first", groups[0]->closed().message());
  EXPECT_EQ(Code::kClosed, signals_from(*groups[0], 1, 1).code());
  EXPECT_EQ(Code::kClosed, groups[0]->signal(1, 1).code());
  EXPECT_EQ(Code::kClosed, groups[0]->exchange({}, patience()).status().code());
  EXPECT_EQ(Code::kClosed, groups[0]->block(*groups[0]->barrier(patience())).code());
  leave(groups);
}

TEST(Group, CloseEndsWaitsButTellsNobody) {
  const Groups groups = formed_groups(2);
  groups[0]->close("ending");

  EXPECT_EQ(Code::kClosed, signals_from(*groups[0], 1, 1).code());
  EXPECT_TRUE(groups[1]->check_peer(0).ok());
  groups[0]->leave("ended");
  EXPECT_FALSE(groups[1]->check_peer(0).ok());
  EXPECT_EQ("ending", groups[0]->closed().message());
  leave(groups);
}

TEST(Group, MayBeLeftFromACallback) {
  std::weak_ptr<Group> gone;
  {
    const Groups groups = formed_groups(2);
    gone = groups[0];
    std::promise<void> left;
    {
      const auto wait = groups[0]->signals({{1, 1}}, patience());
      wait->on_finish([&] {
        groups[0]->leave("from within");
        left.set_value();
      });
      ASSERT_TRUE(groups[0]->start(wait).ok());
      ASSERT_TRUE(groups[1]->signal(0, 1).ok());
    }
    left.get_future().wait();
    EXPECT_EQ(Code::kPeer, groups[1]->check_peer(0).code());
    leave(groups);
  }

  EXPECT_TRUE(becomes_true([&] { return gone.expired(); }));
}

TEST(Group, LeavesNothingBehind) {
  const std::size_t descriptors = open_descriptors();
  const std::size_t mapped = segments_mapped();
  for (int round = 0; round < 20; ++round) {
    std::vector<std::weak_ptr<Group>> gone;
    {
      const Groups groups = formed_groups(3);
      gone.assign(groups.begin(), groups.end());
      for (const auto& group : groups) {
        ASSERT_TRUE(group->start(group->signals({{1, 9}}, patience())).ok());
        const auto dropped = group->signals({{1, 9}}, patience());
      }
      leave(groups);
    }
    for (const auto& group : gone) ASSERT_TRUE(group.expired());
  }

  EXPECT_EQ(descriptors, open_descriptors());
  EXPECT_EQ(mapped, segments_mapped());
}

TEST(Group, IsGoneWithoutLeaveToo) {
  std::vector<std::weak_ptr<Group>> gone;
  {
    const Groups groups = formed_groups(2);
    gone.assign(groups.begin(), groups.end());
    const auto dropped = groups[0]->signals({{1, 9}}, patience());
  }

  for (const auto& group : gone) EXPECT_TRUE(group.expired());
}

TEST(Group, IsDroppedWithItsLastWaitAfterItLeft) {
  std::weak_ptr<Group> gone;
  std::shared_ptr<Wait> wait;
  {
    const Groups groups = formed_groups(2);
    gone = groups[0];
    wait = groups[0]->signals({{1, 9}}, patience());
    ASSERT_TRUE(groups[0]->start(wait).ok());
    leave(groups);
  }
  wait.reset();

  EXPECT_TRUE(gone.expired());
}

}  // namespace
}  // namespace weightsync::shm
