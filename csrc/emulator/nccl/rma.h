// Signals: the host's side of a communicator's signal counters; what rma_*.cpp and
// window.cpp share.
//
// Counters only grow. The arrivals are in the receiver's control segment, by context
// and source. The host of the sender numbers its signals, and the host of the receiver
// counts what its waits take, both in the order of launches.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "emulator/faults.h"
#include "emulator/nccl/comm.h"
#include "emulator/nccl/outcome.h"
#include "emulator/nccl/rma_proxy.h"
#include "emulator/nccl/rma_rules.h"
#include "shm/annotations.h"

namespace weightsync::emulator::nccl {

// Thread-safe; one for each communicator.
class Signals {
 public:
  bool exist() const WEIGHTSYNC_EXCLUDES(mu_);
  // Once, with the ranks that faults go by, of all ranks.
  void make(std::vector<int> fault_ranks) WEIGHTSYNC_EXCLUDES(mu_);

  // The number of the next signal to a peer.
  std::uint64_t number_next(int context, int peer) WEIGHTSYNC_EXCLUDES(mu_);
  // The arrivals that satisfy everything expected from a source so far and this.
  std::uint64_t expect(int context, int source, int count) WEIGHTSYNC_EXCLUDES(mu_);

  // Whether a peer is reached through a network (by configuration).
  bool is_remote(int rank, int peer) const WEIGHTSYNC_EXCLUDES(mu_);
  Proxy& proxy() { return proxy_; }

 private:
  using Counters = std::array<std::vector<std::uint64_t>, kRmaContexts>;

  // Own synchronisation.
  Proxy proxy_;

  mutable shm::Mutex mu_;
  bool made_ WEIGHTSYNC_GUARDED_BY(mu_) = false;
  Counters sent_ WEIGHTSYNC_GUARDED_BY(mu_);
  Counters expected_ WEIGHTSYNC_GUARDED_BY(mu_);
  std::vector<int> fault_ranks_ WEIGHTSYNC_GUARDED_BY(mu_);
};

// Host steps that wait for all ranks, if they have not been made. In 2.30.7 the first
// one-sided call makes the signals, from 2.31 on the first window does.
Outcome make_signals(Communicator& communicator);
Outcome make_signals_with_windows(Communicator& communicator);

// The same for all three calls: what the rules look at, and the step that makes the
// signals if this call has to.
RmaCall rma_call(Communicator& communicator);
Outcome add_signals(const std::shared_ptr<Communicator>& communicator,
                    const std::string& call);

}  // namespace weightsync::emulator::nccl
