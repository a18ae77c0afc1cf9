// What the tests of this folder share: ranks as threads of this process, or as
// processes of their own, with buffers in the memory of their devices.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "emulator/core.h"
#include "emulator/nccl/config_support.h"
#include "emulator/nccl/symbols.h"

extern char** environ;

namespace weightsync::emulator::nccl {

// A buffer on a device; released when it goes.
class DeviceBuffer {
 public:
  DeviceBuffer(int device, std::size_t nbytes, Kind kind = Kind::kMalloc) {
    auto allocated = allocate(device, kind, nbytes);
    EXPECT_TRUE(allocated.ok()) << allocated.status().message();
    if (allocated.ok()) base_ = allocated.value().base;
  }
  ~DeviceBuffer() { EXPECT_TRUE(base_ == nullptr || release(base_).ok()); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  std::byte* data() const { return base_; }

 private:
  std::byte* base_ = nullptr;
};

struct Rank {
  int rank = 0;
  int size = 0;
  int device = 0;
  ncclComm_t communicator = nullptr;
  // cudaStreamPerThread: of the thread that drives this rank.
  cudaStream_t stream = reinterpret_cast<cudaStream_t>(2);

  void synchronize() const { stream_of(stream)->synchronize(); }
};

inline ncclUniqueId new_unique_id() {
  ncclUniqueId id{};
  EXPECT_EQ(ncclSuccess, ncclGetUniqueId(&id));
  return id;
}

// Joins, acts, and leaves. Each rank has a device of its own while there are enough.
inline void be_a_rank(int rank, int size, const ncclUniqueId& id,
                      const std::function<void(Rank&)>& act,
                      ncclConfig_t config = undefined_config()) {
  Rank self;
  self.rank = rank;
  self.size = size;
  self.device = rank % device_count();
  ASSERT_TRUE(set_current_device(self.device).ok());
  ncclCommInitRankConfig(&self.communicator, size, id, rank, &config);
  ASSERT_EQ(ncclSuccess, poll(self.communicator));
  act(self);
  self.synchronize();
  if (self.communicator != nullptr) {
    EXPECT_EQ(ncclSuccess, ncclCommDestroy(self.communicator));
  }
}

inline void as_threads(int size, const std::function<void(Rank&)>& act,
                       const ncclConfig_t& config = undefined_config()) {
  const ncclUniqueId id = new_unique_id();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] { be_a_rank(rank, size, id, act, config); });
  }
  for (std::thread& thread : threads) thread.join();
}

// Another run of this test program, as one rank, of the one (disabled) test `name`,
// which calls be_this_process().
class RankProcess {
 public:
  RankProcess(const std::string& name, int rank, int size, const ncclUniqueId& id,
              const std::vector<std::string>& variables = {}) {
    std::string text;
    for (const char each : id.internal) {
      static const char* const kDigits = "0123456789abcdef";
      text += kDigits[static_cast<unsigned char>(each) / 16];
      text += kDigits[static_cast<unsigned char>(each) % 16];
    }
    std::vector<std::string> environment = variables;
    environment.push_back("WEIGHTSYNC_TEST_RANK=" + std::to_string(rank));
    environment.push_back("WEIGHTSYNC_TEST_SIZE=" + std::to_string(size));
    environment.push_back("WEIGHTSYNC_TEST_ID=" + text);
    std::vector<std::string> arguments = {"/proc/self/exe", "--gtest_filter=" + name,
                                          "--gtest_also_run_disabled_tests",
                                          "--gtest_brief=1"};
    std::vector<char*> argv = pointers(arguments);
    std::vector<char*> envp = pointers(environment);
    envp.pop_back();
    for (char** each = environ; *each != nullptr; ++each) envp.push_back(*each);
    envp.push_back(nullptr);
    EXPECT_EQ(
        0, ::posix_spawn(&pid_, argv[0], nullptr, nullptr, argv.data(), envp.data()));
  }
  ~RankProcess() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    wait();
  }
  RankProcess(RankProcess&& other) noexcept : pid_(std::exchange(other.pid_, -1)) {}
  RankProcess& operator=(RankProcess&&) = delete;

  void kill() const { ::kill(pid_, SIGKILL); }
  // The exit code, or minus the signal that ended it.
  int wait() {
    int status = 0;
    ::waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  // The same, but a process that hangs is killed.
  int wait_in_time() {
    for (int tenths = 0; tenths < 600; ++tenths) {
      siginfo_t info{};
      ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT);
      if (info.si_pid == pid_) return wait();
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    kill();
    return wait();
  }

 private:
  static std::vector<char*> pointers(std::vector<std::string>& texts) {
    std::vector<char*> result;
    for (std::string& text : texts) result.push_back(text.data());
    result.push_back(nullptr);
    return result;
  }

  pid_t pid_ = -1;
};

// The exit codes, by rank.
inline std::vector<int> as_processes(int size, const std::string& name,
                                     const std::vector<std::string>& variables = {}) {
  const ncclUniqueId id = new_unique_id();
  std::vector<RankProcess> processes;
  for (int rank = 0; rank < size; ++rank) {
    processes.emplace_back(name, rank, size, id, variables);
  }
  std::vector<int> codes;
  for (RankProcess& process : processes) codes.push_back(process.wait_in_time());
  return codes;
}

// What a process was told that RankProcess started.
inline int told_number(const char* name) { return std::atoi(std::getenv(name)); }

inline ncclUniqueId told_id() {
  const char* const text = std::getenv("WEIGHTSYNC_TEST_ID");
  ncclUniqueId id{};
  for (std::size_t i = 0; i < sizeof id.internal; ++i) {
    const std::string digits(text + 2 * i, 2);
    id.internal[i] = static_cast<char>(std::stoi(digits, nullptr, 16));
  }
  return id;
}

inline void be_this_process(const std::function<void(Rank&)>& act) {
  if (std::getenv("WEIGHTSYNC_TEST_ID") == nullptr) {
    GTEST_SKIP() << "a part of another test";
  }
  be_a_rank(told_number("WEIGHTSYNC_TEST_RANK"), told_number("WEIGHTSYNC_TEST_SIZE"),
            told_id(), act);
}

}  // namespace weightsync::emulator::nccl
