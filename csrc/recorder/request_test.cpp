#include "recorder/request.h"

#include <gtest/gtest.h>

#include <csignal>
#include <future>

namespace weightsync::recorder {
namespace {

volatile std::sig_atomic_t earlier_calls = 0;

void earlier(int) { earlier_calls = earlier_calls + 1; }

TEST(SignalNumber, IsFoundByNameAndByNumber) {
  EXPECT_EQ(SIGUSR2, signal_number("SIGUSR2"));
  EXPECT_EQ(SIGUSR2, signal_number("USR2"));
  EXPECT_EQ(SIGUSR2, signal_number(std::to_string(SIGUSR2)));
  EXPECT_EQ(0, signal_number("SIGKILL"));
  EXPECT_EQ(0, signal_number("sometimes"));
  EXPECT_EQ(0, signal_number(""));
}

TEST(DumpOnSignal, CallsTheThreadAndTheEarlierHandler) {
  std::signal(SIGUSR2, earlier);
  auto* const asked = new std::promise<void>();  // the thread outlives the test
  std::future<void> heard = asked->get_future();
  const shm::Status first = dump_on_signal(SIGUSR2, [asked] { asked->set_value(); });
  const shm::Status second = dump_on_signal(SIGUSR1, [] {});
  std::raise(SIGUSR2);
  const auto answered = heard.wait_for(std::chrono::seconds(30));

  EXPECT_TRUE(first.ok()) << first.message();
  EXPECT_FALSE(second.ok());
  EXPECT_EQ(std::future_status::ready, answered);
  EXPECT_EQ(1, earlier_calls);
}

}  // namespace
}  // namespace weightsync::recorder
