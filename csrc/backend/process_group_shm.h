// ProcessGroupShm: the c10d backend "weightsync-shm", for processes of one host.
//
// It offers what weightsync needs of a process group: windows, reconfigure, barrier,
// abort and shutdown. Other collectives are Gloo's job.
//
// Owns the current shm::Group and the one whose handle was given out for the next
// configuration. A destructor is not a teardown: shutdown() and abort() are,
// idempotently. Any thread may call anything, without the GIL.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "../shm/executor.h"
#include "../shm/group.h"

namespace weightsync {

// One configuration: its group, and the thread that copies for it.
struct Configuration {
  std::shared_ptr<shm::Group> group;
  shm::Executor executor;

  // After the peers see this rank leave, it writes nothing more to them.
  void end(const std::string& why) {
    group->close(why);
    executor.stop();
    group->leave(why);
  }
};

class ProcessGroupShm : public c10d::Backend {
 public:
  // With `enable_reconfigure` nothing is formed until reconfigure(); otherwise the
  // ranks find each other through the store, and this returns when all are there.
  ProcessGroupShm(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                  std::chrono::milliseconds timeout, bool enable_reconfigure);
  ~ProcessGroupShm() override;

  const std::string getBackendName() const override { return "weightsync-shm"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;

  bool supportsReconfigure() const override { return true; }
  c10d::ReconfigureHandle get_reconfigure_handle() const override;
  c10::intrusive_ptr<c10d::Work> reconfigure(
      const c10d::ReconfigureOptions& opts) override;

  bool supportsWindow() const override { return true; }
  c10::intrusive_ptr<c10d::Window> new_window(
      const std::optional<at::Tensor>& tensor = std::nullopt) override;

  // Tensors that peers can put into. Every page is present when this returns.
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options = {}) override;

  c10::intrusive_ptr<c10d::Work> barrier(
      const c10d::BarrierOptions& opts = c10d::BarrierOptions()) override;

  void registerAbortHook(int64_t id, c10d::AbortHook hook) override;
  void unregisterAbortHook(int64_t id) override;
  void abort() override;
  void shutdown() override;
  c10d::ErrorType getError() override;

  // The configuration that is formed, or an error that says why there is none.
  std::shared_ptr<Configuration> configuration() const;

  // `timeout` if it is set, else the group's.
  shm::Deadline deadline(std::chrono::milliseconds timeout) const;

 private:
  using Hooks = std::map<std::int64_t, std::shared_ptr<const c10d::AbortHook>>;

  shm::Group& next() const;
  void form(const std::vector<std::string>& handles, std::uint64_t digest,
            shm::Deadline deadline);
  // Makes a formed configuration the current one; mu_ is held.
  void adopt(std::shared_ptr<Configuration> configuration);
  void end(const std::string& why);

  const c10::intrusive_ptr<Options> options_;

  mutable std::mutex mu_;
  std::chrono::milliseconds timeout_;         // guarded by mu_
  std::shared_ptr<Configuration> current_;    // guarded by mu_
  std::shared_ptr<shm::Group> forming_;       // guarded by mu_; while it is joined
  mutable std::shared_ptr<shm::Group> next_;  // guarded by mu_
  std::set<std::int64_t> used_uuids_;         // guarded by mu_
  Hooks hooks_;                               // guarded by mu_
  std::string ended_;                         // guarded by mu_; why, once ended
};

// The segment that holds this tensor, or null if it is ordinary memory.
std::shared_ptr<shm::Segment> segment_of(const at::Tensor& tensor);

}  // namespace weightsync
