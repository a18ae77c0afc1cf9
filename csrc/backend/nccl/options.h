// OptionsNccl: what a process group is made with, besides its members.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>

#include "nccl/communicator.h"

namespace weightsync {

inline constexpr const char* kNcclBackend = "weightsync-nccl2";

// What torch's own backend reads: whoever sets it means us, too.
inline bool blocking_wait_by_environment() {
  const char* const value = std::getenv("TORCH_NCCL_BLOCKING_WAIT");
  return value != nullptr && std::strcmp(value, "1") == 0;
}

struct OptionsNccl : c10d::Backend::Options {
  explicit OptionsNccl(std::chrono::milliseconds timeout = kBackendDefaultTimeout)
      : Options(kNcclBackend, timeout) {}
  // Of a group that is split off: everything, and not only what torch knows of.
  c10::intrusive_ptr<Options> clone() const override {
    return c10::make_intrusive<OptionsNccl>(*this);
  }

  nccl::Config config;
  bool is_high_priority_stream = false;
  // wait() waits on the host until the operation is over, and raises if it fails.
  bool blocking_wait = blocking_wait_by_environment();
  // Which NCCL: a path, or nothing for the one that is found.
  std::string library;
  // What the group is for, in NCCL's own messages.
  std::string group_desc;
  // With what the names of the files begin that the last operations are dumped into;
  // see trace::use_prefix.
  std::string trace_prefix;
};

}  // namespace weightsync
