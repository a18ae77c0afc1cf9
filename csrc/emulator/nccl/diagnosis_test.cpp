#include "emulator/nccl/diagnosis.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>

#include "emulator/nccl/window_support.h"

namespace weightsync::emulator::nccl::diagnosis {
namespace {

using std::chrono::milliseconds;

Blocked blocked(const std::string& who) {
  return {[who] { return who; }, [] { return std::string("ncclTest; waits for ever"); },
          [] { return std::vector<std::string>{"rank 1 is dead"}; }, nullptr};
}

// Bodies are disabled tests, each run by one of those below.

// Runs the body of that name in a program of its own, with this limit.
Watched run(const std::string& limit, const std::string& body) {
  return watch_processes(1, "DISABLED_Diagnosis." + body,
                         {"WEIGHTSYNC_EMULATOR_HANG_SECONDS=" + limit});
}

// In that program.
void be_watched(void (*body)()) {
  if (std::getenv("WEIGHTSYNC_TEST_ID") == nullptr) {
    GTEST_SKIP() << "a part of another test";
  }
  print_for_the_watcher();
  body();
}

bool says(const Watched& ended, const std::string& text) {
  return ended.printed.find(text) != std::string::npos;
}

TEST(DISABLED_Diagnosis, is_blocked) {
  be_watched([] {
    const Guard guard(blocked("rank 0 of 2"));
    std::this_thread::sleep_for(milliseconds(20000));
  });
}

TEST(Diagnosis, a_guard_that_lives_too_long_ends_the_process_with_a_report) {
  const Watched ended = run("0.2", "is_blocked");

  EXPECT_EQ(kHangExitCode, ended.codes[0]);
  EXPECT_TRUE(says(ended, "rank 0 of 2 is blocked since 0."));
  EXPECT_TRUE(says(ended, "in ncclTest; waits for ever"));
  EXPECT_TRUE(says(ended, "rank 1 is dead"));
  EXPECT_TRUE(says(ended, "weightsync emulator"));
}

TEST(DISABLED_Diagnosis, is_blocked_twice) {
  be_watched([] {
    std::thread other([] {
      const Guard guard(blocked("rank 1 of 2"));
      std::this_thread::sleep_for(milliseconds(20000));
    });
    const Guard guard(blocked("rank 0 of 2"));
    std::this_thread::sleep_for(milliseconds(20000));
    other.join();
  });
}

TEST(Diagnosis, a_report_names_everybody_who_is_blocked_once) {
  const Watched ended = run("0.2", "is_blocked_twice");

  EXPECT_EQ(kHangExitCode, ended.codes[0]);
  EXPECT_TRUE(says(ended, "rank 0 of 2"));
  EXPECT_TRUE(says(ended, "rank 1 of 2"));
  EXPECT_EQ(ended.printed.find("nothing moves"), ended.printed.rfind("nothing moves"));
}

TEST(DISABLED_Diagnosis, moves) {
  be_watched([] {
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
}

TEST(Diagnosis, whoever_moves_is_left_alone) {
  const Watched ended = run("0.5", "moves");

  EXPECT_EQ(0, ended.codes[0]);
  EXPECT_EQ("", ended.printed);
}

TEST(DISABLED_Diagnosis, is_blocked_for_a_while) {
  be_watched([] {
    const Guard guard(blocked("rank 0 of 2"));
    std::this_thread::sleep_for(milliseconds(600));
  });
}

TEST(Diagnosis, a_limit_of_zero_is_none) {
  const Watched ended = run("0", "is_blocked_for_a_while");

  EXPECT_EQ(0, ended.codes[0]);
}

TEST(DISABLED_Diagnosis, forks) {
  be_watched([] {
    {
      const Guard starts_the_watcher(blocked("the parent"));
    }
    // Nobody tells when the watcher sleeps. Until then it may hold a lock of the
    // address sanitizer, which its child would find taken.
    std::this_thread::sleep_for(milliseconds(50));
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
}

TEST(Diagnosis, a_forked_child_has_a_watcher_of_its_own) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the thread sanitizer allows no threads in the child of threads";
#endif
  const Watched ended = run("0.3", "forks");

  EXPECT_EQ(kHangExitCode, ended.codes[0]);
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
