// Bootstrap: how the ranks of a group come to one communicator, through its store.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <memory>
#include <string>

#include "nccl/communicator.h"

namespace weightsync {

// The NCCL of this process for a path in the options ("": the one that is found).
// Opened once for each path.
nccl::Result<std::shared_ptr<const nccl::Library>> library_for(const std::string& path);

// Called by all ranks with the same key, which nobody used before: rank 0 makes the id.
// Blocks until all have come or the deadline passed, or `interrupted` says why not to
// wait any longer.
nccl::Result<nccl::Communicator::Pointer> meet(
    c10d::Store& store, const std::string& key,
    const std::shared_ptr<const nccl::Library>& library,
    const nccl::Communicator::Place& place, const nccl::Config& config,
    shm::Deadline deadline, const nccl::Interrupted& interrupted);

}  // namespace weightsync
