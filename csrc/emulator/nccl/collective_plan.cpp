#include "emulator/nccl/collective_plan.h"

#include <algorithm>

namespace weightsync::emulator::nccl {

const char* function_of(Collective kind) {
  switch (kind) {
    case Collective::kAllReduce:
      return "ncclAllReduce";
    case Collective::kReduce:
      return "ncclReduce";
    case Collective::kBroadcast:
      return "ncclBroadcast";
    case Collective::kReduceScatter:
      return "ncclReduceScatter";
    case Collective::kAllGather:
      return "ncclAllGather";
    case Collective::kAllToAll:
      return "ncclAlltoAll";
    case Collective::kGather:
      return "ncclGather";
    case Collective::kScatter:
      return "ncclScatter";
  }
  return "unknown collective";
}

OperationKind fault_of(Collective kind) {
  switch (kind) {
    case Collective::kAllReduce:
      return OperationKind::kAllReduce;
    case Collective::kReduce:
      return OperationKind::kReduce;
    case Collective::kBroadcast:
      return OperationKind::kBroadcast;
    case Collective::kReduceScatter:
      return OperationKind::kReduceScatter;
    case Collective::kAllGather:
      return OperationKind::kAllGather;
    case Collective::kAllToAll:
      return OperationKind::kAllToAll;
    case Collective::kGather:
      return OperationKind::kGather;
    case Collective::kScatter:
      break;
  }
  return OperationKind::kScatter;
}

bool has_root(Collective kind) {
  return kind == Collective::kReduce || kind == Collective::kBroadcast ||
         kind == Collective::kGather || kind == Collective::kScatter;
}

bool reduces(Collective kind) {
  return kind == Collective::kAllReduce || kind == Collective::kReduce ||
         kind == Collective::kReduceScatter;
}

std::string describe(const CollectiveDescriptor& asked) {
  std::string details;
  if (reduces(asked.kind)) details = name_of(asked.reduction);
  if (has_root(asked.kind)) {
    details += (details.empty() ? "root " : ", root ") + std::to_string(asked.root);
  }
  const std::string text = std::string(function_of(asked.kind)) + " of " +
                           describe_elements(asked.count, asked.type);
  return details.empty() ? text : text + " (" + details + ")";
}

CollectivePlan plan(const CollectiveDescriptor& asked, int rank, int size) {
  const std::size_t block = asked.count * size_of(asked.type);
  const std::size_t blocks = block * static_cast<std::size_t>(size);
  const auto of_rank = static_cast<std::ptrdiff_t>(block) * rank;
  const auto of_root = static_cast<std::ptrdiff_t>(block) * asked.root;
  const bool is_root = rank == asked.root;
  switch (asked.kind) {
    case Collective::kAllReduce:
      return {block, block, block, 0};
    case Collective::kReduce:
      return {block, is_root ? block : 0, block, 0};
    case Collective::kBroadcast:
      return {is_root ? block : 0, block, block, 0};
    case Collective::kReduceScatter:
      return {blocks, block, block, of_rank};
    case Collective::kAllGather:
      return {block, blocks, block, -of_rank};
    case Collective::kAllToAll:
      return {blocks, blocks, block, std::nullopt};
    case Collective::kGather:
      return {block, is_root ? blocks : 0, block, -of_root};
    case Collective::kScatter:
      break;
  }
  return {is_root ? blocks : 0, block, block, of_root};
}

bool overlaps(const CollectivePlan& plan, const void* input, const void* output) {
  if (plan.input == 0 || plan.output == 0) return false;
  const auto from = reinterpret_cast<std::uintptr_t>(input);
  const auto to = reinterpret_cast<std::uintptr_t>(output);
  if (plan.in_place && from + static_cast<std::uintptr_t>(*plan.in_place) == to) {
    return false;
  }
  return from < to + plan.output && to < from + plan.input;
}

std::vector<std::string> disagreement(const std::vector<CollectiveDescriptor>& all) {
  const auto agrees = [&](const CollectiveDescriptor& other) {
    const CollectiveDescriptor& first = all.front();
    return other.kind == first.kind && other.type == first.type &&
           other.count == first.count &&
           (!reduces(first.kind) || other.reduction == first.reduction) &&
           (!has_root(first.kind) || other.root == first.root);
  };
  if (std::all_of(all.begin(), all.end(), agrees)) return {};
  std::vector<std::string> lines;
  lines.reserve(all.size());
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    lines.push_back("rank " + std::to_string(rank) + " called " + describe(all[rank]) +
                    " from " + to_string(all[rank].call_site));
  }
  return lines;
}

Share share_of(std::size_t count, int rank, int size) {
  // Whole blocks of cache lines, so that ranks do not write to the same ones.
  constexpr std::size_t kGrain = 1024;
  const std::size_t ranks = static_cast<std::size_t>(size);
  const std::size_t grains = (count + kGrain - 1) / kGrain;
  const std::size_t each = (grains + ranks - 1) / ranks * kGrain;
  const std::size_t first = std::min(count, each * static_cast<std::size_t>(rank));
  return {first, std::min(count - first, each)};
}

}  // namespace weightsync::emulator::nccl
