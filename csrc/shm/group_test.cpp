// Signals, barriers and exchanges of a group whose ranks are threads.
#include "group.h"

#include <algorithm>
#include <random>

#include "test_support.h"

namespace weightsync::shm {
namespace {

Status signals_from(Group& group, int peer, std::uint64_t count,
                    Deadline deadline = patience()) {
  const auto wait = group.signals({{peer, count}}, deadline);
  return group.block(*wait);
}

TEST(Group, CountsSignalsForEachPairOfRanks) {
  const Groups groups = formed_groups(3);
  ASSERT_TRUE(groups[1]->signal(0, 3).ok());
  ASSERT_TRUE(groups[2]->signal(0, 1).ok());
  ASSERT_TRUE(groups[0]->signal(0, 2).ok());

  EXPECT_EQ(2U, groups[0]->available(0));
  EXPECT_EQ(3U, groups[0]->available(1));
  EXPECT_EQ(1U, groups[0]->available(2));
  EXPECT_EQ(0U, groups[1]->available(0));
  EXPECT_TRUE(signals_from(*groups[0], 1, 2).ok());
  EXPECT_EQ(1U, groups[0]->available(1));
  EXPECT_EQ(1U, groups[0]->available(2));
  leave(groups);
}

TEST(Group, TakesSignalsTogetherOrNotAtAll) {
  const Groups groups = formed_groups(3);
  ASSERT_TRUE(groups[1]->signal(0, 2).ok());
  const auto both = groups[0]->signals({{1, 2}, {2, 1}}, patience());

  EXPECT_FALSE(both->poll());
  EXPECT_EQ(2U, groups[0]->available(1));
  ASSERT_TRUE(groups[2]->signal(0, 1).ok());
  EXPECT_TRUE(both->poll());
  EXPECT_TRUE(both->outcome().ok());
  EXPECT_EQ(0U, groups[0]->available(1));
  EXPECT_EQ(0U, groups[0]->available(2));
  leave(groups);
}

TEST(Group, AddsUpWhatIsExpectedOfOnePeer) {
  const Groups groups = formed_groups(2);
  const auto twice = groups[0]->signals({{1, 1}, {1, 1}}, patience());
  ASSERT_TRUE(groups[1]->signal(0, 1).ok());

  EXPECT_FALSE(twice->poll());
  ASSERT_TRUE(groups[1]->signal(0, 1).ok());
  EXPECT_TRUE(twice->poll());
  EXPECT_EQ(0U, groups[0]->available(1));
  leave(groups);
}

TEST(Group, KnowsNoRankOutsideIt) {
  const Groups groups = formed_groups(2);
  for (const int peer : {-1, 2, 4096}) {
    EXPECT_EQ(Code::kInvalid, groups[0]->check_peer(peer).code());
    EXPECT_EQ(Code::kInvalid, groups[0]->signal(peer, 1).code());
    EXPECT_EQ(Code::kInvalid, signals_from(*groups[0], peer, 1).code());
  }
  leave(groups);
}

TEST(Group, AWaitThatTimesOutTakesNothingAndSaysWhatLacks) {
  const Groups groups = formed_groups(3);
  ASSERT_TRUE(groups[1]->signal(0, 2).ok());
  const auto wait = groups[0]->signals({{1, 5}, {2, 1}, {0, 0}}, soon());
  const Status outcome = groups[0]->block(*wait);

  EXPECT_EQ(Code::kTimedOut, outcome.code());
  EXPECT_EQ("timed out waiting for signals: 3 of 5 from rank 1; 1 of 1 from rank 2",
            outcome.message());
  EXPECT_EQ(2U, groups[0]->available(1));
  leave(groups);
}

TEST(Group, AWaitThatIsGivenUpTakesNothing) {
  const Groups groups = formed_groups(2);
  const auto wait = groups[0]->signals({{1, 1}}, patience());
  wait->complete({Code::kCancelled, "given up"});
  ASSERT_TRUE(groups[1]->signal(0, 1).ok());

  EXPECT_TRUE(wait->poll());
  EXPECT_EQ(1U, groups[0]->available(1));
  leave(groups);
}

TEST(Group, NoSignalIsLostAmongManyWaits) {
  constexpr int kEach = kSanitized ? 200 : 2'000;
  const Groups groups = formed_groups(3);
  std::atomic<std::uint64_t> taken{0};
  on_every_rank(4, [&](int thread) {
    for (int i = 0; i < kEach; ++i) {
      if (thread < 2) {
        EXPECT_TRUE(groups[thread + 1]->signal(0, 2).ok());
        continue;
      }
      const auto wait = groups[0]->signals({{1, 1}, {2, 1}}, patience());
      EXPECT_TRUE(groups[0]->start(wait).ok());
      if (i % 2 == 0) wait->complete({Code::kCancelled, ""});
      if (groups[0]->block(*wait).ok()) ++taken;
    }
  });

  EXPECT_EQ(2 * kEach, taken + groups[0]->available(1));
  EXPECT_EQ(2 * kEach, taken + groups[0]->available(2));
  leave(groups);
}

TEST(Group, BytesStoredBeforeASignalAreThere) {
  constexpr int kRounds = kSanitized ? 500 : 5'000;
  const auto memory = Segment::create(4096, Populate::kYes).take();
  auto* const numbers = reinterpret_cast<std::uint64_t*>(memory->data());
  const Groups groups = formed_groups(2);
  on_every_rank(2, [&](int rank) {
    const auto seen = Segment::open(memory->locator(), Populate::kYes).take();
    auto* const mine = reinterpret_cast<std::uint64_t*>(seen->data());
    for (std::uint64_t i = 1; i <= kRounds; ++i) {
      if (rank == 0) {
        std::fill(mine, mine + 512, i);
        ASSERT_TRUE(groups[0]->signal(1, 1).ok());
        ASSERT_TRUE(signals_from(*groups[0], 1, 1).ok());
      } else {
        ASSERT_TRUE(signals_from(*groups[1], 0, 1).ok());
        ASSERT_EQ(512, std::count(mine, mine + 512, i));
        ASSERT_TRUE(groups[1]->signal(0, 1).ok());
      }
    }
  });

  EXPECT_EQ(static_cast<std::uint64_t>(kRounds), numbers[511]);
  leave(groups);
}

TEST(Group, NobodyPassesABarrierAlone) {
  constexpr int kRounds = kSanitized ? 50 : 300;
  constexpr int kSize = 3;
  const Groups groups = formed_groups(kSize);
  std::atomic<int> entered[kRounds] = {};
  on_every_rank(kSize, [&](int rank) {
    std::mt19937 random(static_cast<unsigned>(rank));
    for (int round = 0; round < kRounds; ++round) {
      const auto delay = std::chrono::microseconds(random() % (100 * (rank + 1)));
      if (round % 10 == rank) std::this_thread::sleep_for(delay);
      ++entered[round];
      const auto wait = groups[rank]->barrier(patience());
      ASSERT_TRUE(groups[rank]->block(*wait).ok());
      ASSERT_EQ(kSize, entered[round]);
    }
  });
  leave(groups);
}

TEST(Group, ABarrierThatTimesOutNamesTheMissing) {
  const Groups groups = formed_groups(3);
  const auto other = groups[2]->barrier(patience());
  const auto wait = groups[0]->barrier(soon());
  const Status outcome = groups[0]->block(*wait);

  EXPECT_EQ(Code::kTimedOut, outcome.code());
  EXPECT_EQ("barrier timed out: rank 1 did not come", outcome.message());
  leave(groups);
}

TEST(Group, ExchangesWindowsAgainAndAgainAtAnySpeed) {
  constexpr std::uint64_t kRounds = kSanitized ? 50 : 300;
  const Groups groups = formed_groups(3);
  on_every_rank(3, [&](int rank) {
    std::mt19937 random(static_cast<unsigned>(rank));
    for (std::uint64_t round = 0; round < kRounds; ++round) {
      const auto delay = std::chrono::microseconds(random() % 500);
      if (round % 7 == static_cast<std::uint64_t>(rank))
        std::this_thread::sleep_for(delay);
      WindowEntry mine{};
      mine.offset = 1000 * static_cast<std::uint64_t>(rank);
      mine.nbytes = round;
      mine.dtype = static_cast<std::int64_t>(round);
      auto entries = groups[rank]->exchange(mine, patience());
      ASSERT_TRUE(entries.ok()) << entries.status().message();
      for (std::uint64_t peer = 0; peer < 3; ++peer) {
        ASSERT_EQ(1000 * peer, entries.value()[peer].offset);
        ASSERT_EQ(round, entries.value()[peer].nbytes);
        ASSERT_EQ(static_cast<std::int64_t>(round), entries.value()[peer].dtype);
      }
    }
  });
  leave(groups);
}

TEST(Group, ExchangeNamesWhoDoesNotCome) {
  const Groups groups = formed_groups(2);
  const Status outcome = groups[0]->exchange({}, soon()).status();

  EXPECT_EQ("window registration timed out: rank 1 did not come", outcome.message());
  leave(groups);
}

}  // namespace
}  // namespace weightsync::shm
