// Watchdog: the thread that sees to what nobody waits for.
//
// It lets go of the tensors of finished operations, ends a session when one of its
// operations or a call of NCCL takes too long or NCCL reports an error behind the
// calls, and runs the abort hooks then. It never ends the process.
//
// Tensors of operations that did not finish are kept until their communicator is gone:
// before that NCCL may still write to them.
//
// Any thread may call anything, but not with the GIL: hooks and tensors take it. No
// lock is held while a hook runs or a tensor goes.
#pragma once

#include <torch/version.h>
#include <torch/csrc/distributed/c10d/Hooks.hpp>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "backend/nccl/session.h"
#include "backend/nccl/work_nccl.h"

namespace weightsync {

class Watchdog : public std::enable_shared_from_this<Watchdog> {
 public:
  using Work = std::shared_ptr<Operation>;

  void add(Work work);
  // What a call has left behind that failed: nobody knows it, so no hook is called.
  void keep(Work work);
  // Looks at the calls that threads make of this session's communicator.
  void watch(const std::shared_ptr<Session>& session);
  // Ends a session: its pending operations fail with this, the hooks run, and its
  // communicator is aborted. Only the first call for a session does anything.
  void fail(const std::shared_ptr<Session>& session, const shm::Status& why);
  // As fail(), but the communicator lives and no hook runs. True if it is the first.
  bool give_up(const std::shared_ptr<Session>& session, const shm::Status& why);
  // Whether all operations of the session are over before the deadline.
  bool drain(const Session& session, shm::Deadline deadline);

  void register_hook(std::int64_t id, c10d::AbortHook hook);
  void unregister_hook(std::int64_t id);
#if TORCH_VERSION_MINOR >= 15
  // Called for each operation that ends well, once.
  void register_completion_hook(std::int64_t id, c10d::CompletionHook hook);
  void unregister_completion_hook(std::int64_t id);
#endif
  // By an operation that ended well.
  void completed(std::uint64_t key, std::optional<float> milliseconds);

  // No hook runs and nothing is watched any more; hooks are forgotten. Waits for what
  // the thread does, but not forever. Idempotent, also from a hook.
  void stop();

 private:
  using Hook = std::shared_ptr<const c10d::AbortHook>;

  void start();  // with mu_
  void work();
  void look_at_all();
  void collect();  // what is over by now
  void look_at(const std::vector<std::shared_ptr<Session>>& sessions);
  void run_hooks();
  bool has_work_of(const Session& session);
  std::vector<Work> works_of(const Session& session);

  std::mutex mu_;
  std::condition_variable changed_;
  std::deque<Work> works_;                        // guarded by mu_
  std::vector<std::weak_ptr<Session>> sessions_;  // guarded by mu_
  std::map<std::int64_t, Hook> hooks_;            // guarded by mu_
#if TORCH_VERSION_MINOR >= 15
  using OnCompletion = std::shared_ptr<const c10d::CompletionHook>;
  std::map<std::int64_t, OnCompletion> on_completion_;  // guarded by mu_
  std::atomic<bool> tells_{false};                      // whether there are any
#endif
  std::thread::id thread_;  // guarded by mu_; while it runs
  bool running_ = false;    // guarded by mu_
  bool stopping_ = false;   // guarded by mu_
};

}  // namespace weightsync
