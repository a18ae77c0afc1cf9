// What the tests of windows and one-sided operations share: a rank with a window, a
// stream that can be held, and the report of a process that hangs.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cuda/abi.h"
#include "emulator/core.h"
#include "emulator/nccl/rank_support.h"
#include "emulator/nccl/symbols.h"

extern "C" cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
extern "C" cudaError_t cudaStreamDestroy(cudaStream_t stream);

namespace weightsync::emulator::nccl {

inline constexpr int kSymmetric = kNcclWindowCollSymmetric;

// An environment variable for as long as it lives. Only where no other thread runs.
class Setting {
 public:
  Setting(const char* name, const char* value) : name_(name) {
    ::setenv(name, value, 1);
  }
  ~Setting() { ::unsetenv(name_); }
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;

 private:
  const char* const name_;
};

// A stream of its own, which does not synchronise with the default stream.
class OwnStream {
 public:
  OwnStream() {
    EXPECT_EQ(cudaSuccess, cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking));
  }
  ~OwnStream() { EXPECT_EQ(cudaSuccess, cudaStreamDestroy(handle_)); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  cudaStream_t get() const { return handle_; }
  bool is_idle() const { return stream_of(handle_)->is_idle(); }
  void synchronize() const { stream_of(handle_)->synchronize(); }

  // Nothing enqueued from now on runs before release().
  void hold() {
    const auto gate = gate_;
    stream_of(handle_)->enqueue("a gate of the test", [gate] {
      while (!gate->load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
  }
  void release() { gate_->store(true); }

 private:
  cudaStream_t handle_ = nullptr;
  const std::shared_ptr<std::atomic<bool>> gate_ =
      std::make_shared<std::atomic<bool>>(false);
};

// Whether it is after a while: for what must not end by itself.
inline bool stays_busy(const OwnStream& stream) {
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  return !stream.is_idle();
}

// Memory that windows can be made of, filled with zeroes, and one over all of it.
class TestWindow {
 public:
  TestWindow(ncclComm_t communicator, int device, std::size_t nbytes)
      : communicator_(communicator), memory_(device, nbytes, Kind::kVmm) {
    EXPECT_EQ(ncclSuccess, ncclCommWindowRegister(communicator, memory_.data(), nbytes,
                                                  &handle_, kSymmetric));
  }
  TestWindow(const Rank& rank, std::size_t nbytes)
      : TestWindow(rank.communicator, rank.device, nbytes) {}
  ~TestWindow() {
    EXPECT_EQ(ncclSuccess, ncclCommWindowDeregister(communicator_, handle_));
  }
  TestWindow(const TestWindow&) = delete;
  TestWindow& operator=(const TestWindow&) = delete;

  ncclWindow_t handle() const { return handle_; }
  std::byte* data() const { return memory_.data(); }
  std::uint64_t& word(std::size_t index) const {
    return reinterpret_cast<std::uint64_t*>(data())[index];
  }

 private:
  const ncclComm_t communicator_;
  const DeviceBuffer memory_;
  ncclWindow_t handle_ = nullptr;
};

// One word from `from` of one's own window to `to` of a peer's.
inline ncclResult_t put_word(const TestWindow& window, const Rank& rank, int peer,
                             std::size_t from, std::size_t to,
                             cudaStream_t stream = nullptr) {
  return ncclPutSignal(&window.word(from), 1, ncclUint64, peer, window.handle(),
                       to * sizeof(std::uint64_t), 0, 0, 0, rank.communicator,
                       stream == nullptr ? rank.stream : stream);
}

inline ncclResult_t send_signal(const Rank& rank, int peer,
                                cudaStream_t stream = nullptr) {
  return ncclSignal(peer, 0, 0, 0, rank.communicator,
                    stream == nullptr ? rank.stream : stream);
}

inline ncclResult_t wait_for(const Rank& rank, int peer, int count,
                             cudaStream_t stream = nullptr) {
  ncclWaitSignalDesc_t descriptor{count, peer, 0, 0};
  return ncclWaitSignal(1, &descriptor, rank.communicator,
                        stream == nullptr ? rank.stream : stream);
}

// Waits on the host until all ranks of the communicator came here.
inline void meet(const Rank& rank) {
  for (int peer = 0; peer < rank.size; ++peer) {
    EXPECT_EQ(ncclSuccess, send_signal(rank, peer));
  }
  for (int peer = 0; peer < rank.size; ++peer) {
    EXPECT_EQ(ncclSuccess, wait_for(rank, peer, 1));
  }
  rank.synchronize();
}

// Ranks that are threads wait for each other on the host, whatever their streams do.
class Steps {
 public:
  void reach(int step) { reached_.store(step); }
  void await(int step) const {
    while (reached_.load() < step) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

 private:
  std::atomic<int> reached_{0};
};

// Processes as ranks whose stderr is read.
enum class Ends { kByThemselves, kWithRank0 };  // rank 0 does, the others are killed

struct Watched {
  std::vector<int> codes;  // by rank
  std::string printed;     // by all
};

inline Watched watch_processes(int size, const std::string& name,
                               std::vector<std::string> variables,
                               Ends ends_how = Ends::kByThemselves) {
  int ends[2];
  EXPECT_EQ(0, ::pipe(ends));
  variables.push_back("WEIGHTSYNC_TEST_STDERR=" + std::to_string(ends[1]));
  Watched watched;
  std::thread reader;
  {
    const ncclUniqueId id = new_unique_id();
    std::vector<RankProcess> processes;
    for (int rank = 0; rank < size; ++rank) {
      processes.emplace_back(name, rank, size, id, variables);
    }
    ::close(ends[1]);
    reader = std::thread([&] {
      char buffer[4096];
      for (ssize_t n = 0; (n = ::read(ends[0], buffer, sizeof buffer)) > 0;) {
        watched.printed.append(buffer, static_cast<std::size_t>(n));
      }
    });
    for (RankProcess& process : processes) {
      if (!watched.codes.empty() && ends_how == Ends::kWithRank0) process.kill();
      watched.codes.push_back(process.wait_in_time());
    }
  }
  reader.join();
  ::close(ends[0]);
  return watched;
}

// In such a process, before anything is printed.
inline void print_for_the_watcher() {
  const char* const fd = std::getenv("WEIGHTSYNC_TEST_STDERR");
  if (fd == nullptr) return;
  ::dup2(std::atoi(fd), STDERR_FILENO);
  ::close(std::atoi(fd));
}

}  // namespace weightsync::emulator::nccl
