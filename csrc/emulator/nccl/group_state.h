// What a thread has collected in its open group; for group.cpp, call.cpp and batch.cpp.
#pragma once

#include <memory>
#include <vector>

#include "emulator/nccl/comm.h"
#include "emulator/nccl/group.h"

namespace weightsync::emulator::nccl {

// What a group holds for one communicator, in the order of the calls.
struct Work {
  std::shared_ptr<Communicator> communicator;
  std::vector<HostStep> steps;
  std::vector<std::shared_ptr<Operation>> operations;
  std::vector<std::shared_ptr<Stream>> streams;  // distinct; the last one launches
};

using Batch = std::vector<Work>;

// Executes the group on the calling thread. What failed first; whatever was not done by
// then is dropped, and what can be undone is.
Outcome execute(Batch& batch);
// Drops the group: undoes its steps, last first.
void drop(Batch& batch);

// Makes the end of the open group fail; nothing without one.
void record_failure(const Outcome& outcome);

}  // namespace weightsync::emulator::nccl
