// What the tests of this folder share: child processes, and groups whose ranks are
// threads.
#pragma once

#include <dirent.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "group.h"

namespace weightsync::shm {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// Long enough for a busy machine; only a broken test waits for it.
inline Deadline patience() { return after(std::chrono::seconds(20)); }
inline Deadline soon() { return after(std::chrono::milliseconds(20)); }

// Whether it holds within patience(); for what another thread does by itself.
inline bool becomes_true(const std::function<bool()>& condition) {
  const Deadline limit = patience();
  while (!condition() && Clock::now() < limit) std::this_thread::yield();
  return condition();
}

// One end of a connection that keeps messages apart.
class Channel {
 public:
  explicit Channel(int fd) : fd_(fd) {
    const timeval limit{20, 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  }
  ~Channel() { ::close(fd_); }
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  void say(const std::string& message) const {
    (void)!::send(fd_, message.data(), message.size(), MSG_NOSIGNAL);
  }
  // Empty if the other end is gone, or says nothing.
  std::string hear() const {
    char buffer[512];
    const ssize_t length = ::recv(fd_, buffer, sizeof buffer, 0);
    return length > 0 ? std::string(buffer, static_cast<std::size_t>(length)) : "";
  }

 private:
  const int fd_;
};

// A forked process that runs `body` and ends with what it returns; killed with this.
class Child {
 public:
  explicit Child(const std::function<int(const Channel&)>& body) {
    int fds[2];
    EXPECT_EQ(0, ::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds));
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(fds[0]);
      int code = 0;
      {
        const Channel parent(fds[1]);
        code = body(parent);
      }
      ::_exit(code);
    }
    ::close(fds[1]);
    channel_ = std::make_unique<Channel>(fds[0]);
  }
  ~Child() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    wait();
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  pid_t pid() const { return pid_; }
  const Channel& channel() const { return *channel_; }
  void kill() const { ::kill(pid_, SIGKILL); }
  // The exit code, or minus the signal that ended it.
  int wait() {
    int status = 0;
    ::waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  // The same, but a child that hangs is killed.
  int wait_in_time() {
    for (const Deadline limit = patience(); Clock::now() < limit;) {
      siginfo_t info{};
      ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT);
      if (info.si_pid == pid_) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    kill();
    return wait();
  }

 private:
  pid_t pid_ = -1;
  std::unique_ptr<Channel> channel_;
};

inline std::set<std::string> names_in(const char* folder) {
  std::set<std::string> names;
  if (DIR* const open = ::opendir(folder)) {
    while (const dirent* const entry = ::readdir(open)) names.insert(entry->d_name);
    ::closedir(open);
  }
  return names;
}

inline std::size_t open_descriptors() { return names_in("/proc/self/fd").size(); }

inline std::size_t segments_mapped() {
  std::ifstream maps("/proc/self/maps");
  std::size_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("memfd:weightsync") != std::string::npos ? 1 : 0;
  }
  return count;
}

using Groups = std::vector<std::shared_ptr<Group>>;

inline Groups new_groups(int size) {
  Groups groups;
  for (int i = 0; i < size; ++i) groups.push_back(Group::create().take());
  return groups;
}

inline std::vector<std::string> handles_of(const Groups& groups) {
  std::vector<std::string> handles;
  for (const auto& group : groups) handles.push_back(group->handle());
  return handles;
}

// Calls `act` for each rank in a thread of its own, and waits for all.
inline void on_every_rank(int size, const std::function<void(int)>& act) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(act, rank);
  for (std::thread& thread : threads) thread.join();
}

inline Groups formed_groups(int size) {
  Groups groups = new_groups(size);
  const std::vector<std::string> handles = handles_of(groups);
  on_every_rank(size, [&](int rank) {
    const Status joined = groups[rank]->join(handles, 7, patience());
    EXPECT_TRUE(joined.ok()) << joined.message();
  });
  return groups;
}

inline void leave(const Groups& groups) {
  for (const auto& group : groups) group->leave("the test is over");
}

}  // namespace weightsync::shm
