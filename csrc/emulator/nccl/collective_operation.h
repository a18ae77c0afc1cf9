// CollectiveOperation: one collective on a stream.
//
// The ranks tell each other what they were asked and where their buffers are, and each
// one computes its own output from the inputs of all: nobody writes to the memory of
// another rank. All of them combine in the order of ranks, so all get the same bits.
// What one rank reads of another's buffer, it has read when run() returns there: both
// meet in a barrier at the end.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "emulator/faults.h"
#include "emulator/nccl/collective_plan.h"
#include "emulator/nccl/operation.h"
#include "emulator/nccl/reduction_operators.h"

namespace weightsync::emulator::nccl {

// A collective as it was called, its arguments checked and its operator copied.
struct CollectiveCall {
  const void* input = nullptr;
  void* output = nullptr;
  CollectiveDescriptor asked;
  Operator combine;
  Action fault;
};

class CollectiveOperation : public Operation {
 public:
  explicit CollectiveOperation(CollectiveCall call);

  Phase phase() const override { return Phase::kCollective; }
  std::string describe() const override;
  Outcome run(Execution& execution) override;

 private:
  class Run;

  const CollectiveCall collective_;
};

// What a communicator of one rank does instead, at the call: a copy, or a scaling by
// the operator's factor. Runs on the stream's thread.
Outcome run_alone(const CollectiveCall& call, const Communicator& communicator);

}  // namespace weightsync::emulator::nccl
