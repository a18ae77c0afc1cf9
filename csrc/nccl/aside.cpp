#include "nccl/aside.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

namespace weightsync::nccl {
namespace {

constexpr std::chrono::milliseconds kAsk{100};

struct Answer {
  std::mutex mutex;
  std::condition_variable given;
  std::optional<shm::Status> status;  // guarded by mutex

  bool wait(std::unique_lock<std::mutex>& lock, shm::Deadline until) {
    const auto there = [&] { return status.has_value(); };
    if (until != shm::Deadline::max()) return given.wait_until(lock, until, there);
    given.wait(lock, there);
    return true;
  }
};

}  // namespace

shm::Status run_aside(const std::string& what, shm::Deadline deadline,
                      std::function<shm::Status()> work,
                      const Interrupted& interrupted) {
  const auto answer = std::make_shared<Answer>();
  std::thread([answer, work = std::move(work)]() mutable {
    shm::Status status = work();
    work = nullptr;  // What it owned goes before anybody hears that it ended.
    const std::lock_guard lock(answer->mutex);
    answer->status = std::move(status);
    answer->given.notify_all();
  }).detach();
  std::unique_lock lock(answer->mutex);
  while (!answer->wait(lock,
                       interrupted ? std::min(deadline, shm::after(kAsk)) : deadline)) {
    if (shm::Clock::now() >= deadline) {
      return {shm::Code::kTimedOut, what + " did not end in time, and goes on aside"};
    }
    lock.unlock();
    shm::Status why = interrupted();
    if (!why.ok()) return why;
    lock.lock();
  }
  return *answer->status;  // NOLINT(bugprone-unchecked-optional-access): it is there
}

}  // namespace weightsync::nccl
