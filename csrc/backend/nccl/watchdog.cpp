#include "backend/nccl/watchdog.h"

#include <c10/util/Logging.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "cuda/runtime.h"

#include "backend/nccl/trace.h"

namespace weightsync {
namespace {

using shm::Code;
using shm::Deadline;
using shm::Status;

// How long a tensor of a finished operation may be kept, and a timeout be overdue.
constexpr std::chrono::milliseconds kLook{50};
constexpr std::chrono::milliseconds kIdleLook{250};
constexpr std::chrono::milliseconds kDrainLook{1};
constexpr std::chrono::seconds kAbort{3};
// For the thread to end: it may be in an abort, or in a hook.
constexpr std::chrono::seconds kStop{5};
constexpr int kCaptureModeRelaxed = 2;  // of CUDA's cudaStreamCaptureMode

// Drops what only we keep; what NCCL may still write to stays for good.
void let_go(const Watchdog::Work& work) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<Watchdog::Work>();  // guarded by mutex
  if (work->session().communicator().gone()) {
    work->release();
  } else if (!work->isSuccess()) {
    const std::lock_guard<std::mutex> lock(mutex);
    kept->push_back(work);
  }
}

}  // namespace

void Watchdog::start() {
  if (running_ || stopping_) return;
  running_ = true;
  trace::look_before_dumps(weak_from_this(), [this] { collect(); });
  std::thread thread([self = shared_from_this()] {
    self->work();
    const std::lock_guard<std::mutex> lock(self->mu_);
    self->running_ = false;
    self->changed_.notify_all();
  });
  thread_ = thread.get_id();
  thread.detach();
}

void Watchdog::add(Work work) {
  work->watched_by(weak_from_this());
  keep(std::move(work));
}

void Watchdog::keep(Work work) {
  Work oldest;
  {
    std::unique_lock<std::mutex> lock(mu_);
    if (stopping_) {
      lock.unlock();
      let_go(work);
      return;
    }
    if (!works_.empty()) oldest = works_.front();
    works_.push_back(std::move(work));
    if (works_.size() == 1) changed_.notify_all();
    start();
  }
  // So that they do not pile up between two looks, and their events serve again.
  if (!oldest || !oldest->collect() || !oldest->isSuccess()) return;
  const std::lock_guard<std::mutex> lock(mu_);
  if (!works_.empty() && works_.front() == oldest) works_.pop_front();
}

void Watchdog::watch(const std::shared_ptr<Session>& session) {
  const std::lock_guard<std::mutex> lock(mu_);
  const auto ended = [](const auto& each) { return each.expired(); };
  sessions_.erase(std::remove_if(sessions_.begin(), sessions_.end(), ended),
                  sessions_.end());
  sessions_.push_back(session);
  start();
}

void Watchdog::work() {
  // Asking an event would end the capture of a graph in another thread otherwise. It
  // does not matter if this fails: then nothing can be captured.
  auto relaxed = static_cast<cudaStreamCaptureMode>(kCaptureModeRelaxed);
  (void)cuda::runtime().thread_exchange_capture_mode(&relaxed);
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mu_);
      changed_.wait_for(lock, kIdleLook, [&] { return stopping_ || !works_.empty(); });
      changed_.wait_for(lock, kLook, [&] { return stopping_; });
      if (stopping_) return;
    }
    look_at_all();
  }
}

void Watchdog::look_at_all() {
  std::vector<Work> works;
  std::vector<std::shared_ptr<Session>> sessions;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    works.assign(works_.begin(), works_.end());
    for (const auto& each : sessions_) {
      if (auto session = each.lock()) sessions.push_back(std::move(session));
    }
  }
  for (const Work& each : works) {
    if (each->collect() || shm::Clock::now() < each->deadline()) continue;
    fail(each->session().shared_from_this(),
         {Code::kTimedOut, each->describe() + " timed out after " +
                               std::to_string(each->getTimeout().count()) + " ms"});
  }
  look_at(sessions);
  std::unordered_set<const Operation*> over;
  for (const Work& each : works) {
    if (!each->collect()) continue;
    if (!each->isSuccess() && !each->session().communicator().gone()) continue;
    each->release();
    over.insert(each.get());
  }
  const std::lock_guard<std::mutex> lock(mu_);
  const auto is_over = [&](const Work& work) { return over.count(work.get()) > 0; };
  works_.erase(std::remove_if(works_.begin(), works_.end(), is_over), works_.end());
}

void Watchdog::look_at(const std::vector<std::shared_ptr<Session>>& sessions) {
  for (const auto& session : sessions) {
    if (session->failed()) continue;
    const Status error = session->communicator().async_error();
    if (!error.ok()) {
      fail(session, error);
    } else if (const char* const call = session->overdue()) {
      fail(session, {Code::kTimedOut, std::string(call) +
                                          " timed out: NCCL did not take it, on rank " +
                                          std::to_string(session->rank())});
    }
  }
}

void Watchdog::collect() {
  std::vector<Work> works;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    works.assign(works_.begin(), works_.end());
  }
  for (const Work& each : works) each->collect();
}

std::vector<Watchdog::Work> Watchdog::works_of(const Session& session) {
  std::vector<Work> found;
  const std::lock_guard<std::mutex> lock(mu_);
  for (const Work& each : works_) {
    if (&each->session() == &session) found.push_back(each);
  }
  return found;
}

bool Watchdog::give_up(const std::shared_ptr<Session>& session, const Status& why) {
  // What is finished by now is finished well.
  for (const Work& each : works_of(*session)) each->collect();
  if (!session->fail(why)) return false;
  // Before the abort, which lets the events be reached without the data.
  for (const Work& each : works_of(*session)) each->collect();
  if (why.code() != Code::kClosed) {
    LOG(ERROR) << "weightsync-nccl2: rank " << session->rank() << " of "
               << session->size() << ": " << why.message();
  }
  return true;
}

void Watchdog::fail(const std::shared_ptr<Session>& session, const Status& why) {
  if (!give_up(session, why)) return;
  trace::dump_after(why);
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
  const std::vector<Work> works = works_of(session);
  return std::any_of(works.begin(), works.end(),
                     [](const Work& each) { return !each->collect(); });
}

bool Watchdog::drain(const Session& session, Deadline deadline) {
  while (has_work_of(session)) {
    if (shm::Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(kDrainLook);
  }
  return true;
}

// --- hooks: copying or dropping one takes the GIL, so never under the lock ---

void Watchdog::register_hook(std::int64_t id, c10d::AbortHook hook) {
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

#if TORCH_VERSION_MINOR >= 15
void Watchdog::register_completion_hook(std::int64_t id, c10d::CompletionHook hook) {
  auto kept = std::make_shared<const c10d::CompletionHook>(std::move(hook));
  const std::lock_guard<std::mutex> lock(mu_);
  std::swap(on_completion_[id], kept);
  tells_ = true;
}

void Watchdog::unregister_completion_hook(std::int64_t id) {
  OnCompletion dropped;
  const std::lock_guard<std::mutex> lock(mu_);
  const auto found = on_completion_.find(id);
  if (found == on_completion_.end()) return;
  dropped = std::move(found->second);
  on_completion_.erase(found);
  tells_ = !on_completion_.empty();
}

void Watchdog::completed(std::uint64_t key, std::optional<float> milliseconds) {
  if (!tells_.load(std::memory_order_relaxed)) return;
  std::vector<OnCompletion> hooks;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    for (const auto& [id, hook] : on_completion_) hooks.push_back(hook);
  }
  const c10d::CompletionHookArgs args{key, milliseconds};
  for (const OnCompletion& hook : hooks) {
    try {
      (*hook)(args);
    } catch (const std::exception& error) {
      LOG(ERROR) << "weightsync-nccl2: a completion hook raised: " << error.what();
    }
  }
}
#else
void Watchdog::completed(std::uint64_t, std::optional<float>) {}
#endif

void Watchdog::stop() {
  std::deque<Work> works;
  std::map<std::int64_t, Hook> hooks;
  {
    std::unique_lock<std::mutex> lock(mu_);
    stopping_ = true;
    changed_.notify_all();
    if (running_ && thread_ != std::this_thread::get_id()) {
      changed_.wait_for(lock, kStop, [&] { return !running_; });
    }
    works.swap(works_);
    hooks.swap(hooks_);
  }
  for (const Work& each : works) let_go(each);
}

}  // namespace weightsync
