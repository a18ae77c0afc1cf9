#include "nccl/aside.h"

#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

namespace weightsync::nccl {
namespace {

struct Answer {
  std::mutex mutex;
  std::condition_variable given;
  std::optional<shm::Status> status;  // guarded by mutex
};

}  // namespace

shm::Status run_aside(const std::string& what, shm::Deadline deadline,
                      std::function<shm::Status()> work) {
  const auto answer = std::make_shared<Answer>();
  std::thread([answer, work = std::move(work)]() mutable {
    shm::Status status = work();
    work = nullptr;  // What it owned goes before anybody hears that it ended.
    const std::lock_guard lock(answer->mutex);
    answer->status = std::move(status);
    answer->given.notify_all();
  }).detach();
  std::unique_lock lock(answer->mutex);
  const auto there = [&] { return answer->status.has_value(); };
  if (deadline == shm::Deadline::max()) {
    answer->given.wait(lock, there);
  } else if (!answer->given.wait_until(lock, deadline, there)) {
    return {shm::Code::kTimedOut, what + " did not end in time, and goes on aside"};
  }
  return *answer->status;  // NOLINT(bugprone-unchecked-optional-access): it is there
}

}  // namespace weightsync::nccl
