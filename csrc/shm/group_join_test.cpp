// How a group is formed, and how it is not.
#include "group.h"

#include <algorithm>

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

TEST(Group, GivesRanksByPosition) {
  const Groups groups = new_groups(3);
  std::vector<std::string> handles = handles_of(groups);
  std::reverse(handles.begin(), handles.end());
  on_every_rank(
      3, [&](int i) { EXPECT_TRUE(groups[i]->join(handles, 7, patience()).ok()); });

  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(2 - i, groups[i]->rank());
    EXPECT_EQ(3, groups[i]->size());
  }
  leave(groups);
}

TEST(Group, OfOneRankNeedsNobody) {
  const auto group = Group::create().take();
  ASSERT_TRUE(group->join({group->handle()}, 0, soon()).ok());
  ASSERT_TRUE(group->signal(0, 1).ok());

  EXPECT_TRUE(signals_from(*group, 0, 1).ok());
  EXPECT_TRUE(group->block(*group->barrier(patience())).ok());
  group->leave("over");
}

TEST(Group, RefusesHandlesThatCannotFormOne) {
  const Groups groups = new_groups(2);
  const std::string mine = groups[0]->handle();
  const std::string other = groups[1]->handle();
  const std::vector<std::vector<std::string>> wrong = {
      {}, {other}, {mine, mine}, {mine, other, other}};
  for (const auto& handles : wrong) {
    EXPECT_EQ(Code::kInvalid, groups[0]->join(handles, 7, patience()).code());
  }
  leave(groups);
}

TEST(Group, RefusesWhatIsNoHandle) {
  const std::vector<std::string> wrong = {"",
                                          "shm",
                                          "shm:1:2",
                                          "shm:1:2:3:",
                                          "shm:1:2:3x",
                                          "shm: 1:2:3",
                                          "tcp:1:2:3",
                                          "shm:-1:2:3",
                                          "shm:1:-2:3",
                                          "shm:99999999999:2:3",
                                          "shm:1:2:99999999999999999999"};
  for (const std::string& handle : wrong) {
    const auto group = Group::create().take();

    EXPECT_EQ(Code::kInvalid,
              group->join({group->handle(), handle}, 7, patience()).code())
        << handle;
  }
}

TEST(Group, IsFormedOnlyOnce) {
  const auto group = Group::create().take();
  ASSERT_TRUE(group->join({group->handle()}, 7, patience()).ok());

  EXPECT_EQ(Code::kInvalid, group->join({group->handle()}, 7, patience()).code());
}

TEST(Group, DigestsThatDisagreeAreAnErrorOnBothSides) {
  const Groups groups = new_groups(2);
  const std::vector<std::string> handles = handles_of(groups);
  on_every_rank(2, [&](int rank) {
    const auto digest = static_cast<std::uint64_t>(rank) + 2;
    const Status joined = groups[rank]->join(handles, digest, patience());

    EXPECT_EQ(Code::kInvalid, joined.code()) << joined.message();
    groups[rank]->leave("never formed");
  });
}

TEST(Group, ListsInAnotherOrderAreAnErrorOnBothSides) {
  for (int round = 0; round < 30; ++round) {
    const Groups groups = new_groups(2);
    on_every_rank(2, [&](int rank) {
      std::vector<std::string> handles = handles_of(groups);
      if (rank == 1) std::swap(handles[0], handles[1]);
      const auto digest = static_cast<std::uint64_t>(rank) + 2;
      const Status joined = groups[rank]->join(handles, digest, patience());

      EXPECT_EQ(Code::kInvalid, joined.code()) << joined.message();
    });
    leave(groups);
  }
}

TEST(Group, AListThatLacksSomebodyIsAnErrorAtOnce) {
  const Groups groups = new_groups(3);
  std::vector<std::string> handles = handles_of(groups);
  on_every_rank(2, [&](int rank) {
    auto mine = handles;
    if (rank == 0) mine.pop_back();
    const auto digest = static_cast<std::uint64_t>(rank) + 2;

    EXPECT_EQ(Code::kInvalid, groups[rank]->join(mine, digest, patience()).code());
  });
  leave(groups);
}

TEST(Group, JoinThatTimesOutNamesTheMissing) {
  const Groups groups = new_groups(4);
  const std::vector<std::string> handles = handles_of(groups);
  on_every_rank(2, [&](int rank) {
    const Status joined =
        groups[rank]->join(handles, 7, after(std::chrono::milliseconds(300)));

    EXPECT_EQ(Code::kTimedOut, joined.code());
    EXPECT_EQ("forming the group timed out: ranks 2, 3 did not come", joined.message());
  });
  leave(groups);
}

TEST(Group, JoinEndsWhenAPeerGivesUp) {
  const Groups groups = new_groups(3);
  std::vector<std::string> handles = handles_of(groups);
  std::thread loser([&] {
    auto wrong = handles;
    wrong[2] = "shm:1:2:nothing";
    EXPECT_EQ(Code::kInvalid, groups[1]->join(wrong, 7, patience()).code());
    groups[1]->leave("cannot join");
  });
  const Status joined = groups[0]->join(handles, 7, patience());
  loser.join();

  EXPECT_EQ(Code::kPeer, joined.code());
  EXPECT_TRUE(says(joined, "rank 1")) << joined.message();
  leave(groups);
}

TEST(Group, AFailedAttemptDoesNotSpoilTheHandlesOfThoseWhoMissedIt) {
  for (const std::uint64_t second : {7, 8}) {
    Groups groups = new_groups(2);
    ASSERT_EQ(Code::kTimedOut, groups[0]->join(handles_of(groups), 6, soon()).code());
    groups[0]->leave("nobody came");
    groups[0] = Group::create().take();
    const std::vector<std::string> handles = handles_of(groups);
    on_every_rank(2, [&](int rank) {
      const Status joined = groups[rank]->join(handles, second, patience());
      EXPECT_TRUE(joined.ok()) << joined.message();
    });

    EXPECT_TRUE(groups[1]->signal(0, 1).ok());
    EXPECT_TRUE(groups[0]->signal(1, 1).ok());
    EXPECT_TRUE(signals_from(*groups[1], 0, 1).ok());
    groups[0]->leave("over");
    EXPECT_EQ(Code::kPeer, groups[1]->check_peer(0).code());
    leave(groups);
  }
}

TEST(Group, JoinIsEndedByLeaveAndClose) {
  for (const bool only_close : {false, true}) {
    for (int round = 0; round < 20; ++round) {
      const Groups groups = new_groups(2);
      std::thread joiner([&] {
        const Status joined = groups[0]->join(handles_of(groups), 7, patience());

        EXPECT_EQ(Code::kClosed, joined.code());
        EXPECT_EQ("given up", joined.message());
      });
      if (only_close) {
        groups[0]->close("given up");
      } else {
        groups[0]->leave("given up");
      }
      joiner.join();
      leave(groups);
    }
  }
}

}  // namespace
}  // namespace weightsync::shm
