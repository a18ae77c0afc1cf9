#include "emulator/nccl/diagnosis.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>

namespace weightsync::emulator::nccl::diagnosis {
namespace {

using std::chrono::milliseconds;

Blocked blocked(const std::string& who) {
  return {[who] { return who; }, [] { return std::string("ncclTest; waits for ever"); },
          [] { return std::vector<std::string>{"rank 1 is dead"}; }, nullptr};
}

struct Ended {
  int code = -1;
  std::string printed;
};

// Runs `body` in a process of its own with this limit; code 0 if it returns.
Ended run(const char* limit, void (*body)()) {
  int ends[2];
  EXPECT_EQ(0, ::pipe(ends));
  const pid_t child = ::fork();
  if (child == 0) {
    ::setenv("WEIGHTSYNC_EMULATOR_HANG_SECONDS", limit, 1);
    ::dup2(ends[1], STDERR_FILENO);
    ::close(ends[0]);
    ::close(ends[1]);
    body();
    ::_exit(0);
  }
  ::close(ends[1]);
  Ended ended;
  char buffer[4096];
  for (ssize_t n = 0; (n = ::read(ends[0], buffer, sizeof buffer)) > 0;) {
    ended.printed.append(buffer, static_cast<std::size_t>(n));
  }
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  if (WIFEXITED(status)) ended.code = WEXITSTATUS(status);
  return ended;
}

bool says(const Ended& ended, const std::string& text) {
  return ended.printed.find(text) != std::string::npos;
}

TEST(Diagnosis, a_guard_that_lives_too_long_ends_the_process_with_a_report) {
  const Ended ended = run("0.2", [] {
    const Guard guard(blocked("rank 0 of 2"));
    std::this_thread::sleep_for(milliseconds(20000));
  });

  EXPECT_EQ(kHangExitCode, ended.code);
  EXPECT_TRUE(says(ended, "rank 0 of 2 is blocked since 0."));
  EXPECT_TRUE(says(ended, "in ncclTest; waits for ever"));
  EXPECT_TRUE(says(ended, "rank 1 is dead"));
  EXPECT_TRUE(says(ended, "weightsync emulator"));
}

TEST(Diagnosis, a_report_names_everybody_who_is_blocked_once) {
  const Ended ended = run("0.2", [] {
    std::thread other([] {
      const Guard guard(blocked("rank 1 of 2"));
      std::this_thread::sleep_for(milliseconds(20000));
    });
    const Guard guard(blocked("rank 0 of 2"));
    std::this_thread::sleep_for(milliseconds(20000));
    other.join();
  });

  EXPECT_EQ(kHangExitCode, ended.code);
  EXPECT_TRUE(says(ended, "rank 0 of 2"));
  EXPECT_TRUE(says(ended, "rank 1 of 2"));
  EXPECT_EQ(ended.printed.find("nothing moves"), ended.printed.rfind("nothing moves"));
}

TEST(Diagnosis, whoever_moves_is_left_alone) {
  const Ended ended = run("0.5", [] {
    Guard guard(blocked("rank 0 of 2"));
    for (int i = 0; i < 10; ++i) {
      std::this_thread::sleep_for(milliseconds(100));
      guard.progress();
    }
    for (int i = 0; i < 10; ++i) {
      const Guard brief(blocked("rank 0 of 2"));
      std::this_thread::sleep_for(milliseconds(10));
    }
  });

  EXPECT_EQ(0, ended.code);
  EXPECT_EQ("", ended.printed);
}

TEST(Diagnosis, a_limit_of_zero_is_none) {
  const Ended ended = run("0", [] {
    const Guard guard(blocked("rank 0 of 2"));
    std::this_thread::sleep_for(milliseconds(600));
  });

  EXPECT_EQ(0, ended.code);
}

TEST(Diagnosis, a_forked_child_has_a_watcher_of_its_own) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the thread sanitizer allows no threads in the child of threads";
#endif
  const Ended ended = run("0.3", [] {
    {
      const Guard starts_the_watcher(blocked("the parent"));
    }
    const pid_t child = ::fork();
    if (child == 0) {
      const Guard guard(blocked("the child"));
      std::this_thread::sleep_for(milliseconds(20000));
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    ::_exit(WEXITSTATUS(status));
  });

  EXPECT_EQ(kHangExitCode, ended.code);
  EXPECT_TRUE(says(ended, "the child"));
  EXPECT_FALSE(says(ended, "the parent"));
}

std::string& published() {
  static auto* const text = new std::string;
  return *text;
}

TEST(Diagnosis, whoever_is_blocked_for_a_while_tells_its_peers_until_it_moves) {
  std::string during;
  {
    Blocked telling = blocked("rank 0 of 2");
    telling.publish = [](const std::string& text) { published() = text; };
    const Guard guard(std::move(telling));
    std::this_thread::sleep_for(milliseconds(900));
    const Guard settles(blocked("orders this thread after the watcher"));
    during = published();
  }

  EXPECT_EQ("ncclTest; waits for ever", during);
  EXPECT_EQ("", published());
}

TEST(Diagnosis, a_limit_that_is_no_number_is_the_default) {
  ::setenv("WEIGHTSYNC_EMULATOR_HANG_SECONDS", "soon", 1);
  EXPECT_EQ(milliseconds(60000), limit_of_environment());
  ::setenv("WEIGHTSYNC_EMULATOR_HANG_SECONDS", "1.5", 1);
  EXPECT_EQ(milliseconds(1500), limit_of_environment());
  ::unsetenv("WEIGHTSYNC_EMULATOR_HANG_SECONDS");
}

}  // namespace
}  // namespace weightsync::emulator::nccl::diagnosis
