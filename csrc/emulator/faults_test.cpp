#include "emulator/faults.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <vector>

namespace weightsync::emulator {
namespace {

using Kind = Action::Kind;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

FaultSpec spec(std::string_view text) {
  auto parsed = parse_faults(text);
  EXPECT_TRUE(parsed.ok()) << parsed.status().message();
  return parsed.ok() ? parsed.take() : FaultSpec{};
}

// Which of the next occurrences go wrong, counted from 1.
std::vector<int> hits(Faults& faults, OperationKind operation, int rank, int count) {
  std::vector<int> found;
  for (int each = 1; each <= count; ++each) {
    if (faults.next(operation, rank)) found.push_back(each);
  }
  return found;
}

using Hits = std::vector<int>;

TEST(Faults, WithoutASpecificationNothingGoesWrong) {
  Faults faults;

  EXPECT_EQ(Hits(), hits(faults, OperationKind::kPut, 0, 3));
}

TEST(Faults, CountsOccurrencesOfEachRankByItself) {
  Faults faults(spec("put@n=2:stall"));
  faults.next(OperationKind::kPut, 1);

  EXPECT_EQ(Hits{2}, hits(faults, OperationKind::kPut, 0, 4));
  EXPECT_EQ(Hits{1}, hits(faults, OperationKind::kPut, 1, 4));
}

TEST(Faults, CountsOnlyTheOperationOfTheEntry) {
  Faults faults(spec("put@n=2:stall"));
  faults.next(OperationKind::kSignal, 0);

  EXPECT_EQ(Hits(), hits(faults, OperationKind::kSignal, 0, 3));
  EXPECT_EQ(Hits{2}, hits(faults, OperationKind::kPut, 0, 3));
}

TEST(Faults, AnyOperationCountsAllOfThem) {
  Faults faults(spec("*@n=3:stall"));
  faults.next(OperationKind::kInit, 0);
  faults.next(OperationKind::kPut, 0);

  EXPECT_EQ(Hits{1}, hits(faults, OperationKind::kWait, 0, 3));
}

TEST(Faults, AFunctionIsCountedByItsNameAndIsNoneOfAnyOperation) {
  Faults faults(spec("cudaMemcpyAsync@n=2:fail=719; *@n=1:stall"));
  const Action first = faults.next_call("cudaMemcpyAsync", 0);
  const Action other = faults.next_call("cudaMemsetAsync", 0);
  const Action second = faults.next_call("cudaMemcpyAsync", 0);

  EXPECT_FALSE(first);
  EXPECT_FALSE(other);
  EXPECT_EQ(719, second.code);
  EXPECT_EQ(Hits{1}, hits(faults, OperationKind::kPut, 0, 2));
}

TEST(Faults, WhatIsInjectedReplacesTheOthersAndCountsAnew) {
  Faults faults(spec("put@from=2:stall"));
  faults.next(OperationKind::kPut, 0);
  faults.inject(spec("put@n=2:kill").rules);

  EXPECT_EQ(Hits{2}, hits(faults, OperationKind::kPut, 0, 3));
}

TEST(Faults, WhatIsTracedGoesOn) {
  Faults faults(spec("put@n=2:stall; *:trace"));

  EXPECT_EQ(Hits(), hits(faults, OperationKind::kWait, 0, 2));
  EXPECT_EQ(Hits{2}, hits(faults, OperationKind::kPut, 0, 3));
}

TEST(Faults, FromMeansAllLaterOnesToo) {
  Faults faults(spec("put@from=3:stall"));

  EXPECT_EQ((Hits{3, 4, 5}), hits(faults, OperationKind::kPut, 0, 5));
}

TEST(Faults, ARankMatchesItselfOnly) {
  Faults faults(spec("put@rank=1:stall"));

  EXPECT_EQ(Hits(), hits(faults, OperationKind::kPut, 0, 2));
  EXPECT_EQ((Hits{1, 2}), hits(faults, OperationKind::kPut, 1, 2));
  EXPECT_EQ(Hits(), hits(faults, OperationKind::kPut, -1, 2));
}

TEST(Faults, TheFirstEntryThatMatchesDecidesAndTheOthersCount) {
  Faults faults(spec("put@n=2:fail=3; put@from=2:stall"));
  faults.next(OperationKind::kPut, 0);
  const Action second = faults.next(OperationKind::kPut, 0);
  const Action third = faults.next(OperationKind::kPut, 0);

  EXPECT_EQ(Kind::kFail, second.kind);
  EXPECT_EQ(3, second.code);
  EXPECT_EQ(Kind::kStall, third.kind);
}

TEST(Faults, AProbabilityIsTheSameInEveryRunAndOtherForEachSeedAndRank) {
  Faults once(spec("put@p=0.3,seed=7:stall"));
  Faults again(spec("put@p=0.3,seed=7:stall"));
  Faults other(spec("put@p=0.3,seed=8:stall"));
  const Hits first = hits(once, OperationKind::kPut, 0, 1000);
  const Hits other_rank = hits(once, OperationKind::kPut, 1, 1000);

  EXPECT_EQ(first, hits(again, OperationKind::kPut, 0, 1000));
  EXPECT_NE(first, hits(other, OperationKind::kPut, 0, 1000));
  EXPECT_NE(first, other_rank);
  EXPECT_NEAR(300.0, static_cast<double>(first.size()), 60.0);
}

TEST(Faults, AProbabilityOfZeroNeverAndOfOneAlwaysMatches) {
  Faults never(spec("put@p=0:stall"));
  Faults always(spec("put@p=1:stall"));

  EXPECT_EQ(Hits(), hits(never, OperationKind::kPut, 0, 100));
  EXPECT_EQ(100U, hits(always, OperationKind::kPut, 0, 100).size());
}

TEST(Faults, RanksThatAreThreadsDoNotDisturbEachOther) {
  Faults alone(spec("put@p=0.5,seed=1:stall"));
  Faults together(spec("put@p=0.5,seed=1:stall"));
  std::vector<Hits> expected(4);
  std::vector<Hits> found(4);
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int rank = 0; rank < 4; ++rank) {
    expected[static_cast<std::size_t>(rank)] =
        hits(alone, OperationKind::kPut, rank, 500);
    threads.emplace_back([&, rank] {
      found[static_cast<std::size_t>(rank)] =
          hits(together, OperationKind::kPut, rank, 500);
    });
  }
  for (std::thread& each : threads) each.join();

  EXPECT_EQ(expected, found);
}

TEST(Faults, GoByTheRankOfTheProcessWhereItIsKnown) {
  const Faults known(FaultSpec{}, 5);
  const Faults unknown;

  EXPECT_EQ(5, known.rank_of(0));
  EXPECT_EQ(5, known.process_rank());
  EXPECT_EQ(2, unknown.rank_of(2));
  EXPECT_EQ(-1, unknown.process_rank());
}

TEST(Faults, AFailureReturnsItsCodeAndOtherActionsDoNot) {
  Faults faults(spec("put@n=1:fail=6; put@n=2:delay=0"));

  EXPECT_EQ(6, failed(faults.next(OperationKind::kPut, 0)));
  EXPECT_EQ(0, failed(faults.next(OperationKind::kPut, 0)));
  EXPECT_EQ(0, failed(faults.next(OperationKind::kPut, 0)));
}

TEST(Faults, ADelayTakesItsTimeAndThenTheOperationExecutes) {
  Faults faults(spec("put:delay=0.05"));
  const auto began = steady_clock::now();
  const bool executes = carry_out(faults.next(OperationKind::kPut, 0));

  EXPECT_TRUE(executes);
  EXPECT_LE(milliseconds(50), steady_clock::now() - began);
}

TEST(Faults, WithoutAFaultTheOperationExecutes) { EXPECT_TRUE(carry_out(Action{})); }

TEST(Faults, AStalledOperationEndsWhenItIsGivenUpAndDoesNotExecute) {
  Faults faults(spec("wait:stall"));
  std::atomic<bool> given_up{false};
  std::atomic<bool> ended{false};
  bool executes = true;
  std::thread stalled([&] {
    const Action fault = faults.next(OperationKind::kWait, 0);
    executes = carry_out(fault, [&] { return given_up.load(); });
    ended = true;
  });
  std::this_thread::sleep_for(milliseconds(50));
  const bool early = ended;
  given_up = true;
  stalled.join();

  EXPECT_FALSE(early);
  EXPECT_FALSE(executes);
}

TEST(Faults, AKilledProcessDiesOfSigkill) {
  Faults faults(spec("put@n=2:kill"));
  const pid_t child = ::fork();
  if (child == 0) {
    carry_out(faults.next(OperationKind::kPut, 0));
    carry_out(faults.next(OperationKind::kPut, 0));
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);

  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(SIGKILL, WTERMSIG(status));
}

TEST(Faults, MemoryEndsWhereTheSpecificationSays) {
  Faults faults(spec("out-of-memory=100"));

  EXPECT_TRUE(allows(faults, 0, 100));
  EXPECT_TRUE(allows(faults, 60, 40));
  EXPECT_FALSE(allows(faults, 60, 41));
  EXPECT_FALSE(allows(faults, 101, 0));
  EXPECT_FALSE(allows(faults, 1, SIZE_MAX));
}

TEST(Faults, AnAllocationCanFailByItsNumber) {
  Faults faults(spec("malloc@rank=3,n=2:fail=2"), 3);

  EXPECT_TRUE(allows(faults, 0, 1));
  EXPECT_FALSE(allows(faults, 0, 1));
  EXPECT_TRUE(allows(faults, 0, 1));
}

class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) {
    ::setenv(name, value, 1);
  }
  ~Environment() { ::unsetenv(name_); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  const char* name_;
};

TEST(Faults, AreReadFromTheEnvironment) {
  const Environment faults("WEIGHTSYNC_EMULATOR_FAULTS", "put:stall");
  const Environment rank("RANK", "3");
  auto found = faults_of_environment();
  ASSERT_TRUE(found.ok());

  EXPECT_EQ(1U, found.value().rules.size());
  EXPECT_EQ(3, rank_of_environment());
}

TEST(Faults, AnEnvironmentWithoutThemHasNone) {
  ::unsetenv("RANK");
  auto found = faults_of_environment();
  ASSERT_TRUE(found.ok());

  EXPECT_TRUE(found.value().rules.empty());
  EXPECT_EQ(std::nullopt, rank_of_environment());
}

TEST(Faults, ARankThatIsNoneIsUnknown) {
  for (const char* value : {"", "x", "-1", "1x"}) {
    const Environment rank("RANK", value);

    EXPECT_EQ(std::nullopt, rank_of_environment()) << value;
  }
}

TEST(Faults, AnUnreadableEnvironmentNamesItsVariable) {
  const Environment faults("WEIGHTSYNC_EMULATOR_FAULTS", "put:explode");
  const auto found = faults_of_environment();
  ASSERT_FALSE(found.ok());

  EXPECT_EQ(0U, found.status().message().rfind(
                    "WEIGHTSYNC_EMULATOR_FAULTS: the fault 'put:explode': ", 0));
}

}  // namespace
}  // namespace weightsync::emulator
