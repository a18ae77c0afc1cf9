#include "monitor.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace weightsync::shm {

Status Monitor::watch(int peer, std::int64_t pid) {
  if (pid == ::getpid()) return {};
  const int pidfd = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
  if (pidfd < 0 && errno == ESRCH) {
    return {Code::kPeer, "rank " + std::to_string(peer) + " (process " +
                             std::to_string(pid) + ") is gone"};
  }
  if (pidfd < 0) return system_error("watch process " + std::to_string(pid), errno);
  watched_.push_back({peer, pidfd});
  return {};
}

Status Monitor::start(std::function<void(int)> on_death) {
  if (watched_.empty()) return {};
  stop_fd_ = ::eventfd(0, EFD_CLOEXEC);
  if (stop_fd_ < 0) return system_error("create an eventfd", errno);
  return thread_.start([this, report = std::move(on_death)] { run(report); });
}

void Monitor::stop() {
  if (thread_.started() && origin_.is_here()) {
    const std::uint64_t one = 1;
    (void)!::write(stop_fd_, &one, sizeof one);
    thread_.join();
  }
  if (stop_fd_ >= 0) ::close(stop_fd_);
  stop_fd_ = -1;
  for (const Watched& watched : watched_) ::close(watched.pidfd);
  watched_.clear();
}

void Monitor::run(const std::function<void(int)>& on_death) const {
  std::vector<pollfd> polled{{stop_fd_, POLLIN, 0}};
  for (const Watched& watched : watched_) polled.push_back({watched.pidfd, POLLIN, 0});
  while (polled[0].revents == 0) {
    if (::poll(polled.data(), polled.size(), -1) < 0) continue;
    for (std::size_t i = 1; i < polled.size(); ++i) {
      if (polled[i].revents == 0) continue;
      polled[i].fd = -1;  // poll skips it from now on
      polled[i].revents = 0;
      on_death(watched_[i - 1].peer);
    }
  }
}

}  // namespace weightsync::shm
