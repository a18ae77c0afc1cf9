// ncclWaitSignal: takes signals in the order of the calls; its stream waits for them.
#include <string>
#include <utility>
#include <vector>

#include "emulator/nccl/group.h"
#include "emulator/nccl/operations.h"
#include "emulator/nccl/process_faults.h"
#include "emulator/nccl/rma.h"
#include "emulator/nccl/stall.h"

namespace weightsync::emulator::nccl {
namespace {

// Each wait is a batch of its own: it takes over nothing.
class WaitOperation : public Operation {
 public:
  WaitOperation(std::vector<ncclWaitSignalDesc_t> descriptors, Action fault)
      : descriptors_(std::move(descriptors)), fault_(std::move(fault)) {}

  Phase phase() const override { return Phase::kOneSided; }

  std::string describe() const override {
    std::string text = "ncclWaitSignal";
    const char* join = " for ";
    for (const ncclWaitSignalDesc_t& each : descriptors_) {
      text += std::exchange(join, " and ") + std::to_string(each.opCnt) +
              " signals of rank " + std::to_string(each.peer);
    }
    return text;
  }

  Outcome launch(Communicator& communicator) override {
    auto& signals = communicator.part<Signals>();
    for (const ncclWaitSignalDesc_t& each : descriptors_) {
      if (each.peer < 0 || each.peer >= communicator.size()) {
        return {ncclInternalError, describe() +
                                       ": the RMA proxy is not connected; rank " +
                                       std::to_string(each.peer) + " does not exist"};
      }
      const std::uint64_t until = signals.expect(each.ctx, each.peer, each.opCnt);
      targets_.push_back({each.peer, each.ctx, until});
    }
    return {};
  }

  // Nothing releases it but the signals: not abort, nor revoke, nor a dead peer.
  Outcome run(Execution& execution) override {
    Communicator& communicator = execution.communicator();
    if (!carry_out_watched(communicator, fault_, OnAbort::kKeepWaiting)) return {};
    execution.wait(
        [&] {
          for (const Target& target : targets_) {
            if (arrived(communicator, target) < target.until) return false;
          }
          return true;
        },
        [&] { return missing(communicator); }, OnAbort::kKeepWaiting);
    return {};
  }

 private:
  struct Target {
    int source;
    int context;
    std::uint64_t until;
  };

  static std::uint64_t arrived(Communicator& communicator, const Target& target) {
    return communicator.control().inbox[target.source].signals[target.context].load();
  }

  std::string missing(Communicator& communicator) const {
    std::string text;
    for (const Target& target : targets_) {
      const std::uint64_t have = arrived(communicator, target);
      if (have >= target.until) continue;
      if (!text.empty()) text += " and ";
      text += "for signal " + std::to_string(target.until) + " of rank " +
              std::to_string(target.source) + " (" + std::to_string(have) + " arrived)";
    }
    return text;
  }

  // Constant after construction.
  const std::vector<ncclWaitSignalDesc_t> descriptors_;
  const Action fault_;
  // Written by launch(), read by run().
  std::vector<Target> targets_;
};

}  // namespace

Outcome wait_signal(int count, const ncclWaitSignalDesc_t* descriptors,
                    const CommunicatorPtr& communicator, cudaStream_t stream) {
  // Rows 2 and 3 of the table, with a better message.
  if (Outcome usable = communicator->usable(); !usable.ok()) return usable;
  WaitCall call;
  call.common = rma_call(*communicator);
  call.descriptors = count;
  call.list = descriptors;
  const Decision decision = decide_wait(call);
  if (decision.code != ncclSuccess) {
    return {decision.code,
            "a wait with " + std::to_string(count) + " descriptors: " + decision.found};
  }
  Action fault = process_faults().next(OperationKind::kWait,
                                       process_faults().rank_of(communicator->rank()));
  if (const int code = failed(fault); code != 0) {
    return {static_cast<ncclResult_t>(code), "a fault was asked for: " + fault.entry};
  }
  if (Outcome made = add_signals(communicator, "ncclWaitSignal"); !made.ok())
    return made;
  // A list of negative length holds nothing: NCCL 2.30.7 does not refuse it.
  std::vector<ncclWaitSignalDesc_t> copied(descriptors,
                                           descriptors + (count > 0 ? count : 0));
  return add_operation(
      communicator,
      std::make_shared<WaitOperation>(std::move(copied), std::move(fault)), stream);
}

}  // namespace weightsync::emulator::nccl
