#include "backend/nccl/watchdog.h"

#include <c10/util/Logging.h>

#include <algorithm>
#include <unordered_set>
#include <utility>
#include <vector>

#include "cuda/runtime.h"

namespace weightsync {
namespace {

using shm::Code;
using shm::Deadline;
using shm::Status;

// How long a tensor of a finished operation may be kept, and a timeout be overdue.
constexpr std::chrono::milliseconds kLook{50};
constexpr std::chrono::milliseconds kDrainLook{1};
constexpr std::chrono::seconds kAbort{5};
constexpr int kCaptureModeRelaxed = 2;  // of CUDA's cudaStreamCaptureMode

}  // namespace

void Watchdog::add(Work work) {
  Work oldest;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    if (!works_.empty()) oldest = works_.front();
    works_.push_back(std::move(work));
    if (works_.size() == 1) changed_.notify_all();
    if (!thread_.joinable() && !stopping_) {
      thread_ = std::thread([self = shared_from_this()] { self->work(); });
    }
  }
  // So that they do not pile up between two looks, and their events serve again.
  if (!oldest || !oldest->collect()) return;
  const std::lock_guard<std::mutex> lock(mu_);
  if (!works_.empty() && works_.front() == oldest) works_.pop_front();
}

void Watchdog::work() {
  // Asking an event would end the capture of a graph in another thread otherwise. It
  // does not matter if this fails: then nothing can be captured.
  auto relaxed = static_cast<cudaStreamCaptureMode>(kCaptureModeRelaxed);
  (void)cuda::runtime().thread_exchange_capture_mode(&relaxed);
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mu_);
      changed_.wait(lock, [&] { return stopping_ || !works_.empty(); });
      changed_.wait_for(lock, kLook, [&] { return stopping_; });
      if (stopping_) return;
    }
    look_at_all();
  }
}

void Watchdog::look_at_all() {
  std::vector<Work> pending;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    pending.assign(works_.begin(), works_.end());
  }
  std::unordered_set<const Operation*> over;
  for (const Work& each : pending) {
    if (each->collect()) {
      over.insert(each.get());
      continue;
    }
    const auto session = each->session().shared_from_this();
    Status error = session->communicator().async_error();
    if (!error.ok()) {
      fail(session, error);
    } else if (shm::Clock::now() >= each->deadline()) {
      fail(session,
           {Code::kTimedOut, each->describe() + " timed out after " +
                                 std::to_string(each->getTimeout().count()) + " ms"});
    }
  }
  const std::lock_guard<std::mutex> lock(mu_);
  const auto is_over = [&](const Work& work) { return over.count(work.get()) > 0; };
  works_.erase(std::remove_if(works_.begin(), works_.end(), is_over), works_.end());
}

void Watchdog::fail(const std::shared_ptr<Session>& session, const Status& why) {
  // What is finished by now is finished well.
  std::vector<Work> works;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    works.assign(works_.begin(), works_.end());
  }
  for (const Work& each : works) {
    if (&each->session() == session.get()) each->collect();
  }
  if (!session->fail(why)) return;
  // Before the abort, which lets the events be reached without the data.
  for (const Work& each : works) {
    if (&each->session() == session.get()) each->collect();
  }
  LOG(ERROR) << "weightsync-nccl2: " << why.message();
  run_hooks();
  const Status aborted = session->communicator().abort(shm::after(kAbort));
  if (!aborted.ok()) LOG(ERROR) << "weightsync-nccl2: " << aborted.message();
}

void Watchdog::run_hooks() {
  std::vector<Hook> hooks;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    for (const auto& [id, hook] : hooks_) hooks.push_back(hook);
  }
  for (const Hook& hook : hooks) {
    try {
      (*hook)();
    } catch (const std::exception& error) {
      LOG(ERROR) << "weightsync-nccl2: an abort hook raised: " << error.what();
    }
  }
}

bool Watchdog::has_work_of(const Session& session) {
  std::vector<Work> works;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    works.assign(works_.begin(), works_.end());
  }
  return std::any_of(works.begin(), works.end(), [&](const Work& each) {
    return &each->session() == &session && !each->collect();
  });
}

bool Watchdog::drain(const Session& session, Deadline deadline) {
  while (has_work_of(session)) {
    if (shm::Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(kDrainLook);
  }
  return true;
}

void Watchdog::register_hook(std::int64_t id, c10d::AbortHook hook) {
  // Copying or dropping a hook takes the GIL: never under the lock.
  auto kept = std::make_shared<const c10d::AbortHook>(std::move(hook));
  const std::lock_guard<std::mutex> lock(mu_);
  std::swap(hooks_[id], kept);
}

void Watchdog::unregister_hook(std::int64_t id) {
  Hook dropped;
  const std::lock_guard<std::mutex> lock(mu_);
  const auto found = hooks_.find(id);
  if (found == hooks_.end()) return;
  dropped = std::move(found->second);
  hooks_.erase(found);
}

void Watchdog::stop() {
  std::thread thread;
  std::deque<Work> works;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    stopping_ = true;
    thread.swap(thread_);
    works.swap(works_);
  }
  changed_.notify_all();
  if (!thread.joinable()) return;
  if (thread.get_id() == std::this_thread::get_id()) {
    thread.detach();
  } else {
    thread.join();
  }
}

}  // namespace weightsync
