// Timeouts: how long the operations of one process group may take.
//
// Any thread may call anything.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <algorithm>
#include <chrono>
#include <mutex>

namespace weightsync {

class Timeouts {
 public:
  using Time = std::chrono::milliseconds;

  // What one operation gets.
  struct Given {
    Time timeout{0};
    Time extension{0};  // to be handed to over() when it is done
  };

  explicit Timeouts(Time each) : each_(each) {}

  void set(Time each) {
    const std::lock_guard<std::mutex> lock(mu_);
    each_ = each;
  }
  // Longer for a while: for what is issued from now on, until the first operation of
  // that is done.
  void extend(Time by) {
    const std::lock_guard<std::mutex> lock(mu_);
    extension_ += std::max(by, Time(0));
  }
  // That which the caller asked for, if it is one, else that of the group.
  Time of(Time asked) const {
    const std::lock_guard<std::mutex> lock(mu_);
    return asked > Time(0) ? asked : each_;
  }
  Given give(Time asked) {
    const std::lock_guard<std::mutex> lock(mu_);
    const Time timeout = (asked > Time(0) ? asked : each_) + extension_;
    // The first one that is issued under an extension ends it.
    const Time mine = extension_ - owned_;
    owned_ = extension_;
    return {timeout, mine};
  }
  void over(Time extension) {
    if (extension == Time(0)) return;
    const std::lock_guard<std::mutex> lock(mu_);
    extension_ -= extension;
    owned_ -= extension;
  }

 private:
  mutable std::mutex mu_;
  Time each_;          // guarded by mu_
  Time extension_{0};  // guarded by mu_; all that is in force
  Time owned_{0};      // guarded by mu_; what of it some operation ends
};

}  // namespace weightsync
