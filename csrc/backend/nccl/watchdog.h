// Watchdog: the thread that sees to what nobody waits for.
//
// It lets go of the tensors of finished operations, ends a session when one of its
// operations takes too long or NCCL reports an error behind the calls, and runs the
// abort hooks then. It never ends the process.
//
// Any thread may call anything, but not with the GIL: hooks and tensors take it.
#pragma once

#include <torch/csrc/distributed/c10d/Hooks.hpp>

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "backend/nccl/session.h"
#include "backend/nccl/work_nccl.h"

namespace weightsync {

class Watchdog : public std::enable_shared_from_this<Watchdog> {
 public:
  using Work = std::shared_ptr<Operation>;

  void add(Work work);
  void add(const c10::intrusive_ptr<WorkNccl>& work) { add(work->operation()); }
  // Ends a session: its pending operations fail with this, the hooks run, and its
  // communicator is aborted. Only the first call for a session does anything.
  void fail(const std::shared_ptr<Session>& session, const shm::Status& why);
  // Whether all operations of the session are over before the deadline.
  bool drain(const Session& session, shm::Deadline deadline);

  void register_hook(std::int64_t id, c10d::AbortHook hook);
  void unregister_hook(std::int64_t id);

  // No hook runs and nothing is watched any more. Idempotent.
  void stop();

 private:
  using Hook = std::shared_ptr<const c10d::AbortHook>;

  void work();
  void look_at_all();
  void run_hooks();
  bool has_work_of(const Session& session);

  std::mutex mu_;
  std::condition_variable changed_;
  std::deque<Work> works_;              // guarded by mu_
  std::map<std::int64_t, Hook> hooks_;  // guarded by mu_
  std::thread thread_;                  // guarded by mu_
  bool stopping_ = false;               // guarded by mu_
};

}  // namespace weightsync
