// CollectivePlan: which rank reads and writes how much in which collective, and what
// the ranks must agree on. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "emulator/faults.h"
#include "emulator/nccl/numbers.h"
#include "emulator/nccl/operation.h"
#include "emulator/nccl/reduce.h"
#include "emulator/nccl/transfer.h"

namespace weightsync::emulator::nccl {

enum class Collective : std::uint8_t {
  kAllReduce,
  kReduce,
  kBroadcast,
  kReduceScatter,
  kAllGather,
  kAllToAll,
  kGather,
  kScatter,
};

const char* function_of(Collective kind);  // "ncclAllReduce"
OperationKind fault_of(Collective kind);
bool has_root(Collective kind);
bool reduces(Collective kind);

// What a rank was asked to do, as it tells its peers.
struct CollectiveDescriptor {
  Collective kind = Collective::kAllReduce;
  Reduction reduction = Reduction::kSum;
  DataType type = DataType::kInt8;
  std::int32_t root = 0;
  std::uint64_t count = 0;   // as in the call
  std::uint64_t factor = 0;  // of this rank, for Reduction::kPreMulSum
  Remote input;              // empty where it has none
  Remote output;             // only of what peers read: a large all-reduce
  CallSiteText call_site{};
};
static_assert(sizeof(CollectiveDescriptor) <= kDescriptorBytes);

// "ncclReduce of 4 float32 (sum, root 0)".
std::string describe(const CollectiveDescriptor& asked);

// The part of one rank, in bytes.
struct CollectivePlan {
  std::size_t input = 0;   // 0: the send buffer is not looked at
  std::size_t output = 0;  // 0: the receive buffer is not looked at
  std::size_t block = 0;   // count elements
  // Where the output lies from the input if the collective works in place; nothing:
  // it cannot.
  std::optional<std::ptrdiff_t> in_place;
};

CollectivePlan plan(const CollectiveDescriptor& asked, int rank, int size);

// Whether writing the output would overwrite input that is still to be read. NCCL does
// not say what happens then.
bool overlaps(const CollectivePlan& plan, const void* input, const void* output);

// What each rank was asked and from where, if not all were asked the same; empty
// otherwise. NCCL does not say what happens then.
std::vector<std::string> disagreement(const std::vector<CollectiveDescriptor>& all);

// The elements of an all-reduce that one rank computes for all.
struct Share {
  std::size_t first = 0;
  std::size_t count = 0;
};
Share share_of(std::size_t count, int rank, int size);

}  // namespace weightsync::emulator::nccl
