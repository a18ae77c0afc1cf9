// What a report says about a communicator: its own operations in their order, and what
// the control segments tell about the other ranks.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "emulator/core.h"
#include "emulator/nccl/comm.h"
#include "emulator/nccl/diagnosis.h"
#include "emulator/nccl/group.h"
#include "emulator/nccl/process_faults.h"
#include "emulator/nccl/shared_segments.h"

namespace weightsync::emulator::nccl::diagnosis {
namespace {

std::string called_from(const std::string& site) {
  return site.empty() ? "" : ", called from " + site;
}

std::string describe_pending(const Serial::Pending& pending) {
  std::string text = pending.running ? "running: " : "behind it: ";
  text += pending.operation + " by " + pending.communicator;
  text += called_from(pending.call_site);
  if (!pending.missing.empty()) text += "; waits " + pending.missing;
  return text;
}

std::string describe_stream(const StreamReport& report) {
  std::string text = report.stream + " runs " + report.operation;
  if (!report.note.empty()) text += " (" + report.note + ")";
  text += called_from(report.call_site);
  text += " for " + std::to_string(report.running.count()) + " ms, ";
  return text + std::to_string(report.queued) + " operations behind it";
}

std::string describe_peer(Communicator& communicator, int rank) {
  Control& peer = communicator.control(rank);
  std::string text =
      "rank " + std::to_string(rank) + " (process " + std::to_string(peer.pid) + ")";
  if (peer.gone.load() != 0) return text + " has left the communicator";
  if (is_process_gone(peer.pid)) return text + " is dead";
  const std::string blocked = peer.blocked.get();
  text += blocked.empty() ? " is not blocked in this communicator"
                          : " is blocked in " + blocked;
  const std::uint64_t arrived = communicator.control().inbox[rank].signals[0].load();
  return text + "; so far it posted " + std::to_string(peer.posted.load()) +
         " collectives, entered " + std::to_string(peer.exchanged.load()) +
         " meetings of hosts and sent " + std::to_string(arrived) +
         " signals to this rank";
}

std::vector<std::string> context_of(Communicator& communicator) {
  std::vector<std::string> lines;
  for (const Serial::Pending& pending : communicator.serial().pending()) {
    lines.push_back(describe_pending(pending));
  }
  for (const StreamReport& report : busy_streams()) {
    lines.push_back(describe_stream(report));
  }
  for (int rank = 0; rank < communicator.size(); ++rank) {
    if (rank != communicator.rank()) lines.push_back(describe_peer(communicator, rank));
  }
  return lines;
}

// What the call that blocks is named: on the host the API call, on a stream the
// operation that runs.
std::string name_of(Communicator& communicator, const CallSite& call) {
  if (call.address != nullptr) {
    return std::string(call.function) + called_from(describe_address(call.address));
  }
  for (const Serial::Pending& pending : communicator.serial().pending()) {
    if (pending.running) return pending.operation + called_from(pending.call_site);
  }
  return "an operation that is not known";
}

}  // namespace

Blocked describe(Communicator& communicator, std::function<std::string()> missing) {
  Communicator* const subject = &communicator;
  const CallSite call = current_call();
  return {
      [subject] { return subject->describe(); },
      [subject, call, missing = std::move(missing)] {
        return name_of(*subject, call) + "; waits " + missing();
      },
      [subject] { return context_of(*subject); },
      [subject](const std::string& text) { subject->control().blocked.set(text); },
      [subject] { return process_faults().spec().set_apart && subject->leaving(); }};
}

Guard::Guard(Communicator& communicator, std::function<std::string()> missing)
    : Guard(describe(communicator, std::move(missing))) {}

Guard::Guard(Communicator& communicator, std::string missing)
    : Guard(communicator, [text = std::move(missing)] { return text; }) {}

}  // namespace weightsync::emulator::nccl::diagnosis
