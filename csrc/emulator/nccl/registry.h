// The communicators that live in this process, by handle.
//
// An ncclComm_t comes from the user and may be anything, so it is looked up and never
// dereferenced. Lives as long as the process: streams may still run at its end.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "nccl/abi.h"

namespace weightsync::emulator::nccl {

class Communicator;

// Any thread may call anything.
class Registry {
 public:
  static Registry& here() {
    static Registry* const instance = new Registry;
    return *instance;
  }

  void add(ncclComm_t handle, std::shared_ptr<Communicator> communicator) {
    const std::lock_guard lock(mutex_);
    live_[handle] = std::move(communicator);
  }

  // What it held, so that the last reference goes outside the lock.
  std::shared_ptr<Communicator> remove(ncclComm_t handle) {
    const std::lock_guard lock(mutex_);
    const auto found = live_.find(handle);
    if (found == live_.end()) return nullptr;
    std::shared_ptr<Communicator> removed = std::move(found->second);
    live_.erase(found);
    return removed;
  }

  std::shared_ptr<Communicator> find(ncclComm_t handle) const {
    const std::lock_guard lock(mutex_);
    const auto found = live_.find(handle);
    return found == live_.end() ? nullptr : found->second;
  }

  std::vector<std::shared_ptr<Communicator>> all() const {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<Communicator>> all;
    all.reserve(live_.size());
    for (const auto& [handle, communicator] : live_) all.push_back(communicator);
    return all;
  }

 private:
  Registry() = default;

  mutable std::mutex mutex_;
  std::map<ncclComm_t, std::shared_ptr<Communicator>> live_;  // guarded by mutex_
};

}  // namespace weightsync::emulator::nccl
