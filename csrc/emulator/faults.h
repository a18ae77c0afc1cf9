// Faults: counts the operations of a process, and says which of them go wrong, and how.
//
// process_faults() (nccl/process_faults.h) is the only one of a process. Every
// operation of NCCL asks once, when it is called; allocations ask by themselves:
//
//   Faults& faults = process_faults();
//   const Action fault = faults.next(OperationKind::kPut, faults.rank_of(comm->rank));
//   if (const int code = failed(fault)) return static_cast<ncclResult_t>(code);
//   enqueue([=] { if (!carry_out(fault, [=] { return comm->gone; })) return; ... });
//
// `failed` belongs where the call is made, `carry_out` where the operation executes: a
// rank that is killed at its third put has made two. Operations that the host itself
// executes (init, window_register) do both at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "emulator/fault_spec.h"
#include "shm/annotations.h"

namespace weightsync::emulator {

// Any thread may call.
class Faults {
 public:
  Faults() = default;
  // `process_rank` is the rank of the whole process (the environment's RANK), if known.
  explicit Faults(FaultSpec spec, std::optional<int> process_rank = std::nullopt)
      : spec_(std::move(spec)), process_rank_(process_rank), rules_(spec_.rules) {}
  Faults(const Faults&) = delete;
  Faults& operator=(const Faults&) = delete;

  // As it was given: what inject() changes is not here.
  const FaultSpec& spec() const { return spec_; }

  // The rank that faults go by. It is the process's, so that a fault follows its
  // process through subgroups, shrinking and growing; where the environment has no RANK
  // (ranks that are threads of one process), the rank in the communicator. Exchange it
  // among the ranks of a communicator before asking spec().network_between.
  int rank_of(int communicator_rank) const {
    return process_rank_.value_or(communicator_rank);
  }
  // For operations without a communicator; -1, which only "every rank" matches, if
  // nobody knows.
  int process_rank() const { return process_rank_.value_or(-1); }

  // Counts one occurrence, and says what becomes of it. The first entry that matches
  // decides; entries behind it count the occurrence all the same. Nothing decided about
  // one rank depends on another one or on the order of threads.
  Action next(OperationKind operation, int rank) WEIGHTSYNC_EXCLUDES(mu_);
  // The same for one call of a function of CUDA or NCCL by its name.
  Action next_call(std::string_view function, int rank) WEIGHTSYNC_EXCLUDES(mu_);

  // These entries and no others from now on; occurrences are counted from now on.
  void inject(std::vector<FaultRule> rules) WEIGHTSYNC_EXCLUDES(mu_);

 private:
  // Constant after construction.
  const FaultSpec spec_;
  const std::optional<int> process_rank_;

  // Guarded by mu_.
  shm::Mutex mu_;
  std::map<std::pair<OperationKind, int>, std::uint64_t> counts_
      WEIGHTSYNC_GUARDED_BY(mu_);
  std::map<int, std::uint64_t> any_counts_ WEIGHTSYNC_GUARDED_BY(mu_);
  std::map<std::string, std::uint64_t, std::less<>> call_counts_
      WEIGHTSYNC_GUARDED_BY(mu_);
  std::vector<FaultRule> rules_ WEIGHTSYNC_GUARDED_BY(mu_);
};

// The specification and the rank of this process, from WEIGHTSYNC_EMULATOR_FAULTS and
// RANK. kInvalid with the reason; the machine then says it and ends the process.
shm::Result<FaultSpec> faults_of_environment();
std::optional<int> rank_of_environment();

// The code that the call returns at once; 0 if it goes on. Says on stderr what it does.
int failed(const Action& action);

// Whether the call succeeds and gives nothing. Says on stderr that it does.
bool is_null(const Action& action);

// Delays, stalls or ends the process; returns whether the operation shall execute.
// A stall, a block and an error last until `given_up` answers true (never, without
// one), and then the operation must not execute. What does not stall returns true.
bool carry_out(const Action& action, const std::function<bool()>& given_up = nullptr);

// One call of a function by its name: the code with which it fails at once; 0 if it
// goes on.
int code_of_call(Faults& faults, const char* function);

// Whether an allocation of device memory may go on, on a device of which `used` bytes
// are taken; one occurrence of malloc.
bool allows(Faults& faults, std::size_t used, std::size_t nbytes);

}  // namespace weightsync::emulator
