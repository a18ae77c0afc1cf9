#include "emulator/nccl/collective_operation.h"

#include <cstring>
#include <utility>

#include "emulator/nccl/comm.h"
#include "emulator/nccl/diagnosis.h"
#include "emulator/nccl/stall.h"

namespace weightsync::emulator::nccl {

namespace {

// Up to here every rank computes the whole of an all-reduce, and saves one meeting.
constexpr std::size_t kSmall = std::size_t{64} << 10;

std::byte* at(void* address) { return static_cast<std::byte*>(address); }

// Reads the factor if it is in memory; now is when the collective executes.
Outcome read_factor(const CollectiveCall& call, const Communicator& communicator,
                    std::uint64_t& factor) {
  factor = call.combine.factor;
  if (call.combine.factor_address == nullptr) return {};
  const std::size_t nbytes = size_of(call.asked.type);
  Outcome access = check_access(communicator, call.combine.factor_address, nbytes);
  if (access.ok()) std::memcpy(&factor, call.combine.factor_address, nbytes);
  return access;
}

Outcome check_buffers(const CollectiveCall& call, const CollectivePlan& plan,
                      const Communicator& communicator) {
  if (overlaps(plan, call.input, call.output)) {
    diagnosis::end_process({communicator.describe() + " called " +
                            describe(call.asked) +
                            " with buffers that overlap, which NCCL does not allow "
                            "unless the collective works in place there"});
  }
  Outcome access;
  if (plan.input > 0) access = check_access(communicator, call.input, plan.input);
  if (access.ok() && plan.output > 0) {
    access = check_access(communicator, call.output, plan.output);
  }
  return access;
}

void copy_bytes(std::byte* to, const std::byte* from, std::size_t nbytes) {
  if (to != from) std::memcpy(to, from, nbytes);
}

}  // namespace

// One execution. Every step returns false when there is nothing more to do: outcome()
// says whether because of a failure or because the communicator was aborted.
class CollectiveOperation::Run {
 public:
  Run(const CollectiveOperation& operation, Execution& execution)
      : call_(operation.collective_),
        execution_(execution),
        communicator_(execution.communicator()),
        rank_(communicator_.rank()),
        size_(communicator_.size()),
        plan_(plan(call_.asked, rank_, size_)) {}

  Outcome run() {
    if (!prepare() || !meet() || !map_inputs() || !compute()) return outcome_;
    // Nobody reads the buffers any more, if there is nothing left to read.
    if (!nothing_to_read_ && !execution_.barrier()) return outcome_;
    output_.flush();
    return outcome_;
  }

 private:
  bool stop_unless_ok(Outcome outcome) {
    outcome_ = std::move(outcome);
    return outcome_.ok();
  }

  bool is_large_all_reduce() const {
    return call_.asked.kind == Collective::kAllReduce && plan_.block > kSmall;
  }

  bool prepare() {
    mine_ = call_.asked;
    mine_.call_site = text_of(execution_.call_site());
    return stop_unless_ok(check_buffers(call_, plan_, communicator_)) &&
           stop_unless_ok(read_factor(call_, communicator_, mine_.factor)) &&
           share_input() && share_output();
  }

  bool share_input() {
    if (plan_.input == 0) return true;
    const Outcome shared = SharedBuffer::create(call_.input, plan_.input, true, input_);
    mine_.input = input_.remote();
    return stop_unless_ok(shared);
  }

  bool share_output() {
    if (!is_large_all_reduce()) return true;
    const Outcome shared =
        SharedBuffer::create(call_.output, plan_.output, false, output_);
    mine_.output = output_.remote();
    return stop_unless_ok(shared);
  }

  bool meet() {
    if (!execution_.exchange(mine_, all_)) return false;
    std::vector<std::string> lines = disagreement(all_);
    if (lines.empty()) return true;
    lines.insert(lines.begin(),
                 communicator_.describe() + ": the ranks disagree about collective " +
                     std::to_string(execution_.collective()) +
                     ", which NCCL would answer with wrong data or a hang");
    diagnosis::end_process(lines);
  }

  bool map(int rank, const Remote& remote, std::byte*& address) {
    address = execution_.map(remote);
    if (address != nullptr) return true;
    return stop_unless_ok({ncclRemoteError, "the memory of rank " +
                                                std::to_string(rank) +
                                                " is gone: " + nccl::describe(mine_)});
  }

  // The inputs that this rank reads.
  bool map_inputs() {
    inputs_.resize(static_cast<std::size_t>(size_));
    if (plan_.output == 0) return true;
    const bool only_root = call_.asked.kind == Collective::kBroadcast ||
                           call_.asked.kind == Collective::kScatter;
    for (int rank = 0; rank < size_; ++rank) {
      if (only_root && rank != call_.asked.root) continue;
      const auto index = static_cast<std::size_t>(rank);
      if (!map(rank, all_[index].input, inputs_[index])) return false;
    }
    return true;
  }

  bool compute() {
    if (plan_.output == 0) return true;
    const auto blocks_of_mine = plan_.block * static_cast<std::size_t>(rank_);
    switch (call_.asked.kind) {
      case Collective::kAllReduce:
        return is_large_all_reduce() ? reduce_shares() : reduce_all();
      case Collective::kReduce:
        reduce_inputs(0, call_.asked.count, at(call_.output));
        break;
      case Collective::kReduceScatter:
        reduce_inputs(call_.asked.count * static_cast<std::size_t>(rank_),
                      call_.asked.count, at(call_.output));
        break;
      case Collective::kBroadcast:
        copy_bytes(at(call_.output), of_root(), plan_.block);
        break;
      case Collective::kScatter:
        copy_bytes(at(call_.output), of_root() + blocks_of_mine, plan_.block);
        break;
      case Collective::kAllGather:
      case Collective::kGather:
        copy_blocks(0);
        break;
      case Collective::kAllToAll:
        copy_blocks(blocks_of_mine);
        break;
    }
    return true;
  }

  const std::byte* of_root() const {
    return inputs_[static_cast<std::size_t>(call_.asked.root)];
  }

  // One block of every rank, in the order of ranks.
  void copy_blocks(std::size_t offset) {
    for (std::size_t rank = 0; rank < inputs_.size(); ++rank) {
      copy_bytes(at(call_.output) + rank * plan_.block, inputs_[rank] + offset,
                 plan_.block);
    }
  }

  void reduce_inputs(std::size_t first, std::size_t count, std::byte* output) const {
    std::vector<ReductionInput> inputs;
    inputs.reserve(inputs_.size());
    for (std::size_t rank = 0; rank < inputs_.size(); ++rank) {
      inputs.push_back({inputs_[rank] + first * element(), all_[rank].factor});
    }
    reduce_elements(call_.asked.reduction, call_.asked.type, inputs, output, count);
  }

  std::size_t element() const { return size_of(call_.asked.type); }

  // In place, the output is input of others: it is written when they have read it.
  bool reduce_all() {
    std::vector<std::byte> result(plan_.block);
    reduce_inputs(0, call_.asked.count, result.data());
    if (!execution_.barrier()) return false;
    copy_bytes(at(call_.output), result.data(), plan_.block);
    nothing_to_read_ = true;
    return true;
  }

  // Each rank reduces a share, which nobody else reads, into its own output, and takes
  // the others from theirs.
  bool reduce_shares() {
    const Share mine = share_of(call_.asked.count, rank_, size_);
    reduce_inputs(mine.first, mine.count, output_.data() + mine.first * element());
    if (!execution_.barrier()) return false;
    for (int rank = 0; rank < size_; ++rank) {
      const Share share = share_of(call_.asked.count, rank, size_);
      if (rank == rank_ || share.count == 0) continue;
      std::byte* from = nullptr;
      if (!map(rank, all_[static_cast<std::size_t>(rank)].output, from)) return false;
      copy_bytes(output_.data() + share.first * element(),
                 from + share.first * element(), share.count * element());
    }
    return true;
  }

  const CollectiveCall& call_;
  Execution& execution_;
  Communicator& communicator_;
  const int rank_;
  const int size_;
  const CollectivePlan plan_;

  Outcome outcome_;
  CollectiveDescriptor mine_;
  std::vector<CollectiveDescriptor> all_;  // by rank
  std::vector<std::byte*> inputs_;         // by rank; null where not read
  SharedBuffer input_;
  SharedBuffer output_;  // of a large all-reduce
  bool nothing_to_read_ = false;
};

CollectiveOperation::CollectiveOperation(CollectiveCall call)
    : collective_(std::move(call)) {}

std::string CollectiveOperation::describe() const {
  return nccl::describe(collective_.asked);
}

Outcome CollectiveOperation::run(Execution& execution) {
  if (!carry_out_watched(execution.communicator(), collective_.fault)) return {};
  return Run(*this, execution).run();
}

Outcome run_alone(const CollectiveCall& call, const Communicator& communicator) {
  const CollectivePlan all = plan(call.asked, 0, 1);
  std::uint64_t factor = 0;
  if (Outcome access = check_buffers(call, all, communicator); !access.ok()) {
    return access;
  }
  if (Outcome read = read_factor(call, communicator, factor); !read.ok()) return read;
  const std::byte* const input = static_cast<const std::byte*>(call.input);
  if (call.combine.reduction == Reduction::kPreMulSum) {
    reduce_elements(Reduction::kPreMulSum, call.asked.type, {{input, factor}},
                    at(call.output), call.asked.count);
  } else {
    copy_bytes(at(call.output), input, all.block);
  }
  return {};
}

}  // namespace weightsync::emulator::nccl
