#include "nccl/aside.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <thread>

#include "shm/test_support.h"

namespace weightsync::nccl {
namespace {

using shm::Code;
using shm::Deadline;
using shm::Status;

TEST(AsideTest, TheAnswerIsThatOfTheWork) {
  const Status failed =
      run_aside("it", shm::patience(), [] { return Status{Code::kPeer, "gone"}; });

  EXPECT_TRUE(run_aside("it", shm::patience(), [] { return Status(); }).ok());
  EXPECT_EQ(Code::kPeer, failed.code());
  EXPECT_EQ("gone", failed.message());
}

TEST(AsideTest, ItRunsOnAThreadOfItsOwn) {
  std::thread::id other;
  const Status status = run_aside("it", Deadline::max(), [&] {
    other = std::this_thread::get_id();
    return Status();
  });

  EXPECT_TRUE(status.ok());
  EXPECT_NE(std::this_thread::get_id(), other);
}

TEST(AsideTest, WorkThatMissesItsDeadlineIsNamedAndGoesOn) {
  std::promise<void> go;
  std::promise<void> ended;
  auto may_go = std::make_shared<std::future<void>>(go.get_future());
  const Status late = run_aside("ncclSleep", shm::soon(), [may_go, &ended] {
    may_go->wait();
    ended.set_value();
    return Status();
  });
  EXPECT_EQ(Code::kTimedOut, late.code());
  EXPECT_NE(std::string::npos, late.message().find("ncclSleep"));
  go.set_value();

  EXPECT_EQ(std::future_status::ready, ended.get_future().wait_until(shm::patience()));
}

TEST(AsideTest, WorkIsLeftAloneWhenTheCallerIsInterrupted) {
  std::promise<void> go;
  std::promise<void> ended;
  auto may_go = std::make_shared<std::future<void>>(go.get_future());
  int asked = 0;
  const Status status = run_aside(
      "ncclSleep", shm::patience(),
      [may_go, &ended] {
        may_go->wait();
        ended.set_value();
        return Status();
      },
      [&] { return ++asked < 2 ? Status() : Status{Code::kPeer, "rank 1 failed"}; });
  EXPECT_EQ(Code::kPeer, status.code());
  EXPECT_EQ("rank 1 failed", status.message());
  EXPECT_EQ(2, asked);
  go.set_value();

  EXPECT_EQ(std::future_status::ready, ended.get_future().wait_until(shm::patience()));
}

TEST(AsideTest, WhoMayBeInterruptedStillHasADeadline) {
  const Status answered = run_aside(
      "it", Deadline::max(), [] { return Status{Code::kClosed, "done"}; },
      [] { return Status(); });
  std::promise<void> go;
  auto may_go = std::make_shared<std::future<void>>(go.get_future());
  const Status late = run_aside(
      "ncclSleep", shm::soon(),
      [may_go] {
        may_go->wait();
        return Status();
      },
      [] { return Status(); });
  go.set_value();

  EXPECT_EQ(Code::kClosed, answered.code());
  EXPECT_EQ(Code::kTimedOut, late.code());
}

TEST(AsideTest, WhatTheWorkOwnsIsGoneBeforeItsAnswerComes) {
  auto owned = std::make_shared<int>(1);
  const std::weak_ptr<int> seen = owned;
  const Status status =
      run_aside("it", shm::patience(), [owned = std::move(owned)] { return Status(); });

  EXPECT_TRUE(status.ok());
  EXPECT_TRUE(seen.expired());
}

}  // namespace
}  // namespace weightsync::nccl
