// OptionsNccl: what a process group is made with, besides its members.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <string>

#include "nccl/communicator.h"

namespace weightsync {

inline constexpr const char* kNcclBackend = "weightsync-nccl2";

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
  bool blocking_wait = false;
  // Which NCCL: a path, or nothing for the one that is found.
  std::string library;
};

}  // namespace weightsync
