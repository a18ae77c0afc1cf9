// FaultSpec: what shall go wrong, as plain values, and the text that says so.
//
//   spec     = { entry (";" | newline) }            "#" starts a comment
//   entry    = operation [ "@" matcher { "," matcher } ] ":" action
//            | "no-symmetric" | "out-of-memory=" bytes
//            | "network=" pair { "," pair }         a pair is "0-2"; "*" is every pair
//            | "set-apart" | "nccl=" version        2.29.7, 2.30.7, 2.31.2, 2.32.3
//   matcher  = "rank=" number | "n=" number | "from=" number
//            | "p=" probability | "seed=" number
//   action   = "delay=" seconds | "stall" | "kill" | "fail=" code | "error=" code
//            | "block" | "null" | "trace"
//
// For example: put@rank=1,n=3:kill; all_reduce@n=2:fail=6; *@p=0.1,seed=7:delay=0.05
//
// An operation is a name of the list below, or "*" (also "any"): those of NCCL, and
// malloc, which is every allocation of device memory. A function of CUDA or NCCL by its
// own name, such as cudaMemcpyAsync, is one too, which "*" leaves out; its code is what
// the function returns, and it neither stalls nor blocks. Without a matcher every
// occurrence matches, of every rank; n is one occurrence, counted from 1; from is that
// one and all later ones. A code is an ncclResult_t, and 2 for malloc. An error is one
// that shows behind the call: the operation never ends, and its communicator fails.
// What blocks keeps the call itself, until the communicator is aborted. A registration
// that is null succeeds and gives no window. What is traced is told on stderr and goes
// on: a list of the calls of a program.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shm/status.h"

namespace weightsync::emulator {

// Enumerator, name in a specification, whose result codes "fail" gives.
// clang-format off
#define WEIGHTSYNC_EMULATOR_OPERATIONS(each)          \
  each(kPut, "put", kNccl)                            \
  each(kSignal, "signal", kNccl)                      \
  each(kWait, "wait", kNccl)                          \
  each(kAllReduce, "all_reduce", kNccl)               \
  each(kReduce, "reduce", kNccl)                      \
  each(kBroadcast, "broadcast", kNccl)                \
  each(kAllGather, "all_gather", kNccl)               \
  each(kReduceScatter, "reduce_scatter", kNccl)       \
  each(kAllToAll, "all_to_all", kNccl)                \
  each(kGather, "gather", kNccl)                      \
  each(kScatter, "scatter", kNccl)                    \
  each(kSend, "send", kNccl)                          \
  each(kRecv, "recv", kNccl)                          \
  each(kInit, "init", kNccl)                          \
  each(kSplit, "split", kNccl)                        \
  each(kShrink, "shrink", kNccl)                      \
  each(kGrow, "grow", kNccl)                          \
  each(kRevoke, "revoke", kNccl)                      \
  each(kAbort, "abort", kNccl)                        \
  each(kFinalize, "finalize", kNccl)                  \
  each(kDestroy, "destroy", kNccl)                    \
  each(kWindowRegister, "window_register", kNccl)     \
  each(kRegister, "register", kNccl)                  \
  each(kMemAlloc, "mem_alloc", kNccl)                 \
  each(kMalloc, "malloc", kCuda)
// clang-format on

enum class OperationKind : std::uint8_t {
#define WEIGHTSYNC_EACH(enumerator, name, library) enumerator,
  WEIGHTSYNC_EMULATOR_OPERATIONS(WEIGHTSYNC_EACH)
#undef WEIGHTSYNC_EACH
};

// The name in a specification.
std::string_view name_of(OperationKind operation);

struct Action {
  enum class Kind : std::uint8_t {
    kNone,
    kDelay,
    kStall,
    kKill,
    kFail,
    kError,
    kBlock,
    kNull,
    kTrace
  };

  Kind kind = Kind::kNone;
  std::chrono::nanoseconds delay{};
  // Of kFail and kError: an ncclResult_t; of malloc a cudaError_t, always
  // cudaErrorMemoryAllocation.
  int code = 0;
  // The entry of the specification, for messages.
  std::string entry;

  explicit operator bool() const { return kind != Kind::kNone; }
};

// One entry that matches occurrences of operations.
struct FaultRule {
  // Not empty: the calls of this function, and no operation.
  std::string function;
  // Nothing: any operation, any rank.
  std::optional<OperationKind> operation;
  std::optional<int> rank;
  // Occurrences from `first` to `last`, counted from 1 for each rank of the process.
  std::uint64_t first = 1;
  std::uint64_t last = UINT64_MAX;
  // Chosen by seed, rank and occurrence: the same in every run.
  double probability = 1.0;
  std::uint64_t seed = 0;
  Action action;
};

struct FaultSpec {
  std::vector<FaultRule> rules;
  // False: ncclCommWindowRegister succeeds with a NULL window, as without CUDA P2P.
  bool symmetric = true;
  // What a communicator that was aborted leaves behind is reported, and ends nothing.
  bool set_apart = false;
  // Device memory that can be allocated on each device, below what the device has.
  std::optional<std::uint64_t> memory;
  // Pairs of ranks, the lower first, that reach each other through a network only.
  std::vector<std::pair<int, int>> networks;
  bool network_everywhere = false;
  // Empty: not said.
  std::string nccl;

  // Whether a put between two ranks goes through a proxy. Never to itself.
  bool network_between(int rank, int peer) const;
};

// kInvalid with a message that names the entry, what was found and what may be there.
shm::Result<FaultSpec> parse_faults(std::string_view text);

// The value of WEIGHTSYNC_EMULATOR_FAULTS: a specification, or "@" and a file of one.
shm::Result<FaultSpec> read_faults(const std::string& value);

}  // namespace weightsync::emulator
