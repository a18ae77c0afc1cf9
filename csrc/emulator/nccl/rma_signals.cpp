// The signals of a communicator: when they are made, and what is common to the three
// one-sided calls.
#include <algorithm>
#include <cstring>
#include <utility>

#include "emulator/nccl/group.h"
#include "emulator/nccl/operations.h"
#include "emulator/nccl/process_faults.h"
#include "emulator/nccl/rma.h"
#include "emulator/nccl/window.h"

namespace weightsync::emulator::nccl {
namespace {

constexpr int kSignalsWithWindows = 23100;  // the version from which on

bool with_windows() { return emulated_version() >= kSignalsWithWindows; }

}  // namespace

bool Signals::exist() const {
  const shm::MutexLock lock(mu_);
  return made_;
}

void Signals::make(std::vector<int> fault_ranks) {
  const shm::MutexLock lock(mu_);
  for (Counters* const counters : {&sent_, &expected_}) {
    for (auto& each : *counters) each.assign(fault_ranks.size(), 0);
  }
  fault_ranks_ = std::move(fault_ranks);
  made_ = true;
}

std::uint64_t Signals::number_next(int context, int peer) {
  const shm::MutexLock lock(mu_);
  return ++sent_[static_cast<std::size_t>(context)][static_cast<std::size_t>(peer)];
}

std::uint64_t Signals::expect(int context, int source, int count) {
  const shm::MutexLock lock(mu_);
  auto& counter =
      expected_[static_cast<std::size_t>(context)][static_cast<std::size_t>(source)];
  return counter += static_cast<std::uint64_t>(count);
}

bool Signals::is_remote(int rank, int peer) const {
  const shm::MutexLock lock(mu_);
  return process_faults().spec().network_between(
      fault_ranks_[static_cast<std::size_t>(rank)],
      fault_ranks_[static_cast<std::size_t>(peer)]);
}

Outcome make_signals(Communicator& communicator) {
  auto& signals = communicator.part<Signals>();
  if (signals.exist()) return {};
  const int mine = process_faults().rank_of(communicator.rank());
  Bytes told(sizeof mine);
  std::memcpy(told.data(), &mine, sizeof mine);
  std::vector<Bytes> all;
  Outcome met = communicator.exchange(
      "the first one-sided call, which every rank has to make", told, all);
  if (!met.ok()) return met;
  std::vector<int> fault_ranks(all.size());
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    std::memcpy(&fault_ranks[rank], all[rank].data(), sizeof(int));
  }
  signals.make(std::move(fault_ranks));
  return {};
}

Outcome make_signals_with_windows(Communicator& communicator) {
  const bool needed = with_windows() && has_host_rma(communicator);
  return needed ? make_signals(communicator) : Outcome();
}

RmaCall rma_call(Communicator& communicator) {
  RmaCall call;
  call.revoked = communicator.revoked();
  call.readiness = communicator.ready().code();
  call.host_rma_support = has_host_rma(communicator);
  call.ranks = communicator.size();
  if (with_windows()) {
    call.contexts = std::min(communicator.config().num_rma_ctx, kRmaContexts);
    call.signals_exist = communicator.part<Signals>().exist();
  }
  return call;
}

Outcome add_signals(const std::shared_ptr<Communicator>& communicator,
                    const std::string& call) {
  if (communicator->part<Signals>().exist()) return {};
  return add_step(communicator, {Step::kRegister, call + ": the first one-sided call",
                                 [communicator] { return make_signals(*communicator); },
                                 nullptr, false});
}

}  // namespace weightsync::emulator::nccl
