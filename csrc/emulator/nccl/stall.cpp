#include "emulator/nccl/stall.h"

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "emulator/nccl/comm.h"
#include "emulator/nccl/diagnosis.h"
#include "emulator/nccl/group.h"

namespace weightsync::emulator::nccl {
namespace {

std::string missing_in(const Action& fault) {
  return "for the end of the fault " + fault.entry + ", which has none";
}

bool stalls(const Action& fault) {
  return fault.kind == Action::Kind::kStall || fault.kind == Action::Kind::kBlock ||
         fault.kind == Action::Kind::kError;
}

// Where there are no peers to tell or to tell of.
diagnosis::Blocked blocked_alone(std::function<std::string()> who,
                                 const Action& fault) {
  return {std::move(who),
          [call = current_call(), missing = missing_in(fault)] {
            return std::string(call.function) + "; waits " + missing;
          },
          [] { return std::vector<std::string>(); }, nullptr};
}

}  // namespace

bool carry_out_watched(Communicator& communicator, const Action& fault,
                       OnAbort on_abort) {
  std::optional<diagnosis::Guard> guard;
  if (fault.kind == Action::Kind::kError) {
    communicator.fail(
        {static_cast<ncclResult_t>(fault.code), "the fault " + fault.entry});
  }
  if (stalls(fault) && communicator.connected()) {
    guard.emplace(communicator, missing_in(fault));
  } else if (stalls(fault)) {
    guard.emplace(blocked_alone([&] { return communicator.describe(); }, fault));
  }
  if (on_abort == OnAbort::kKeepWaiting) return carry_out(fault);
  return carry_out(fault, [&] { return communicator.aborted(); });
}

bool carry_out_watched(const Action& fault) {
  std::optional<diagnosis::Guard> guard;
  if (fault.kind == Action::Kind::kStall) {
    guard.emplace(blocked_alone([] { return std::string("this process"); }, fault));
  }
  return carry_out(fault);
}

}  // namespace weightsync::emulator::nccl
