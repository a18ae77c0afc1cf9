#include "emulator/nccl/lifecycle.h"

#include <string>
#include <utility>
#include <vector>

#include "emulator/core.h"
#include "emulator/nccl/bootstrap.h"
#include "emulator/nccl/device_scope.h"
#include "emulator/nccl/group.h"
#include "emulator/nccl/process_faults.h"
#include "emulator/nccl/stall.h"
#include "emulator/nccl/switches.h"

namespace weightsync::emulator::nccl {
namespace {

Outcome check_ranks(int nranks, int rank) {
  if (nranks < 1 || rank < 0 || rank >= nranks) {
    return invalid_argument("rank " + std::to_string(rank) + " of " +
                            std::to_string(nranks));
  }
  if (nranks > kMaxRanks) {
    return invalid_usage(std::to_string(nranks) + " ranks; the emulator has at most " +
                         std::to_string(kMaxRanks));
  }
  return {};
}

// Waits for all that the communicator has begun, and ends it.
HostStep leaving_step(const CommunicatorPtr& communicator, const char* what) {
  HostStep step;
  step.step = Step::kTeardown;
  step.what = what;
  step.always_blocking = true;
  step.run = [communicator]() -> Outcome {
    communicator->join_work();
    if (communicator->connected()) communicator->synchronize();
    communicator->retire();
    return {};
  };
  return step;
}

// The proxies of the ranks on a machine end together, unless a finalize or a revoke has
// stopped them before.
HostStep destroying_step(const CommunicatorPtr& communicator) {
  HostStep step = leaving_step(communicator, "ncclCommDestroy");
  if (!switches().strict || communicator->finalized()) return step;
  step.run = [communicator, leave = std::move(step.run)]() -> Outcome {
    if (Outcome left = leave(); !left.ok()) return left;
    if (communicator->connected()) communicator->await_departures();
    return {};
  };
  return step;
}

}  // namespace

Outcome meet_fault(OperationKind operation, Communicator& communicator) {
  Faults& faults = process_faults();
  const Action action = faults.next(operation, faults.rank_of(communicator.rank()));
  if (const int code = failed(action); code != 0) {
    return {static_cast<ncclResult_t>(code), "a fault was asked for: " + action.entry};
  }
  if (carry_out_watched(communicator, action)) return {};
  return {ncclInternalError, "aborted while stalled by a fault: " + action.entry};
}

HostStep creation_step(const CommunicatorPtr& child, const ncclUniqueId& id,
                       ncclComm_t* newcomm, OperationKind operation) {
  // Nonblocking, the handle is in progress from now on. If it fails behind the call it
  // stays until the user aborts it: somebody polls it.
  if (!child->config().blocking) child->begin_work(nullptr);
  HostStep step;
  step.step = Step::kCreate;
  step.what = "the creation of " + child->describe();
  step.run = [child, id, operation]() -> Outcome {
    if (Outcome fault = meet_fault(operation, *child); !fault.ok()) return fault;
    return join(*child, id);
  };
  step.undo = [child, newcomm] {
    if (child->has_job()) return;
    *newcomm = nullptr;
    child->retire();
  };
  return step;
}

Outcome init_rank(ncclComm_t* newcomm, int nranks, int rank, int id_count,
                  const ncclUniqueId* ids, const ncclConfig_t* config) {
  if (id_count <= 0 || id_count > nranks) {
    return invalid_argument(std::to_string(id_count) + " unique ids for " +
                            std::to_string(nranks) + " ranks");
  }
  if (newcomm == nullptr || ids == nullptr) {
    return invalid_argument("the communicator or the unique id is NULL");
  }
  *newcomm = nullptr;
  if (Outcome ranks = check_ranks(nranks, rank); !ranks.ok()) return ranks;
  Config parsed;
  if (Outcome found = parse_config(config, Config(), parsed); !found.ok()) return found;
  for (int i = 1; i < id_count && rank == 0; ++i) spend_unique_id(ids[i]);
  const CommunicatorPtr made =
      Communicator::create(rank, nranks, current_device(), std::move(parsed));
  *newcomm = made->handle();
  return add_step(made, creation_step(made, ids[0], newcomm, OperationKind::kInit));
}

Outcome init_all(ncclComm_t* comms, int device_count, const int* devices) {
  if (comms == nullptr || device_count < 0) {
    return invalid_argument(std::to_string(device_count) + " devices, communicators " +
                            (comms == nullptr ? "NULL" : "given"));
  }
  std::vector<int> used;
  for (int i = 0; i < device_count; ++i) {
    used.push_back(devices == nullptr ? i : devices[i]);
    if (used.back() < 0 || used.back() >= emulator::device_count()) {
      return invalid_argument("device " + std::to_string(used.back()) + " of " +
                              std::to_string(emulator::device_count()));
    }
  }
  if (Outcome alone = check_devices(used); !alone.ok()) return alone;
  if (device_count == 0) return {};
  ncclUniqueId id{};
  if (Outcome made = make_unique_id(0, id); !made.ok()) return made;
  for (int i = 0; i < device_count; ++i) {
    const DeviceScope scope(used[static_cast<std::size_t>(i)]);
    Outcome added = init_rank(&comms[i], device_count, i, 1, &id, nullptr);
    if (!added.ok()) return added;
  }
  return {};
}

Outcome finalize(const CommunicatorPtr& communicator) {
  if (communicator->finalized()) {
    return invalid_argument(communicator->describe() +
                            " was finalized or revoked before");
  }
  if (Outcome ready = communicator->ready(); !ready.ok()) return ready;
  communicator->mark_finalized();
  HostStep step;
  step.step = Step::kTeardown;
  step.what = "ncclCommFinalize";
  step.run = [communicator]() -> Outcome {
    Outcome fault = meet_fault(OperationKind::kFinalize, *communicator);
    if (!fault.ok()) return fault;
    communicator->synchronize();
    return {};
  };
  return add_step(communicator, std::move(step));
}

Outcome destroy(const CommunicatorPtr& communicator) {
  communicator->mark_destroyed();
  communicator->join_finished_work();
  if (Outcome ready = communicator->ready(); !ready.ok()) return ready;
  Outcome fault = meet_fault(OperationKind::kDestroy, *communicator);
  if (!fault.ok()) return fault;
  return add_step(communicator, destroying_step(communicator));
}

Outcome abort_operations(const CommunicatorPtr& communicator) {
  communicator->mark_leaving();
  Outcome fault = meet_fault(OperationKind::kAbort, *communicator);
  if (!fault.ok()) return fault;
  communicator->raise_abort();
  return add_step(communicator, leaving_step(communicator, "ncclCommAbort"));
}

Outcome revoke(const CommunicatorPtr& communicator, int flags) {
  if (flags != kNcclRevokeDefault) {
    return invalid_argument("flags " + std::to_string(flags) + "; they must be 0");
  }
  if (communicator->destroyed() || communicator->finalized()) {
    return invalid_argument(communicator->describe() +
                            " was destroyed, finalized or revoked before");
  }
  Outcome fault = meet_fault(OperationKind::kRevoke, *communicator);
  if (!fault.ok()) return fault;
  communicator->mark_finalized();
  communicator->mark_revoked();
  communicator->raise_abort();
  communicator->join_work();
  if (!communicator->connected()) {
    // Its creation has failed, by this or before: there is nothing to be used again.
    communicator->lower_abort();
    return communicator->ready();
  }
  HostStep step;
  step.step = Step::kTeardown;
  step.what = "ncclCommRevoke";
  step.run = [communicator]() -> Outcome {
    communicator->synchronize();
    communicator->lower_abort();
    return {};
  };
  return add_step(communicator, std::move(step));
}

Outcome suspend(const CommunicatorPtr& communicator, int flags) {
  if (Outcome ready = communicator->ready(); !ready.ok()) return ready;
  if (flags != kNcclSuspendMemory) {
    return invalid_argument("flags " + std::to_string(flags) +
                            "; NCCL_SUSPEND_MEM is the only one");
  }
  if (communicator->serial().communicators() > 1) {
    return invalid_usage(communicator->describe() +
                         " shares its resources with another one");
  }
  communicator->synchronize();
  if (communicator->set_suspended(true)) return {};
  return invalid_usage(communicator->describe() + " is suspended already");
}

Outcome resume(const CommunicatorPtr& communicator) {
  if (Outcome ready = communicator->ready(); !ready.ok()) return ready;
  if (communicator->set_suspended(false)) return {};
  return invalid_usage(communicator->describe() + " is not suspended");
}

Outcome memory_stat(const CommunicatorPtr& communicator, ncclCommMemStat_t stat,
                    std::uint64_t* value) {
  if (value == nullptr || stat < ncclStatGpuMemSuspend || stat > ncclStatGpuMemTotal) {
    return invalid_argument("statistic " + std::to_string(stat));
  }
  // A communicator of the emulator holds no device memory.
  *value = stat == ncclStatGpuMemSuspended && communicator->suspended() ? 1 : 0;
  return {};
}

Outcome async_error(const CommunicatorPtr& communicator, ncclResult_t* result) {
  if (result == nullptr) return invalid_argument("the result pointer is NULL");
  communicator->join_finished_work();
  *result = communicator->async_result();
  return {};
}

}  // namespace weightsync::emulator::nccl
