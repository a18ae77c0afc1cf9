#include "backend/nccl/recording.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>

#include "backend/nccl/trace.h"

namespace weightsync {
namespace {

using c10d::OpType;
using recorder::Kind;
using recorder::Operation;
using recorder::Ticket;
using Tensors = Recording::Tensors;

int this_thread() {
  static thread_local const int id = static_cast<int>(::syscall(SYS_gettid));
  return id;
}

bool is_point_to_point(OpType type) {
  return type == OpType::SEND || type == OpType::RECV || type == OpType::RECVANYSOURCE;
}

// As torch's own backends say, whose names its analyser knows.
const char* name_of(OpType type) {
  switch (type) {
    case OpType::BROADCAST:
      return "broadcast";
    case OpType::ALLREDUCE:
      return "all_reduce";
    case OpType::ALLREDUCE_COALESCED:
      return "allreduce_coalesced";
    case OpType::REDUCE:
      return "reduce";
    case OpType::ALLGATHER:
      return "all_gather";
    case OpType::_ALLGATHER_BASE:
      return "_all_gather_base";
    case OpType::ALLGATHER_COALESCED:
      return "all_gather_v";
    case OpType::ALLGATHER_INTO_TENSOR_COALESCED:
      return "all_gather_into_tensor_coalesced";
    case OpType::REDUCE_SCATTER:
      return "reduce_scatter";
    case OpType::_REDUCE_SCATTER_BASE:
      return "_reduce_scatter_base";
    case OpType::REDUCE_SCATTER_TENSOR_COALESCED:
      return "reduce_scatter_tensor_coalesced";
    case OpType::ALLTOALL:
    case OpType::ALLTOALL_BASE:
      return "all_to_all";
    case OpType::GATHER:
      return "gather";
    case OpType::SCATTER:
      return "scatter";
    case OpType::BARRIER:
      return "barrier";
    case OpType::SEND:
      return "send";
    case OpType::RECV:
    case OpType::RECVANYSOURCE:
      return "recv";
    default:
      return "coalesced";
  }
}

void add(Operation& to, const at::Tensor& tensor, bool is_output) {
  const c10::IntArrayRef sizes = tensor.sizes();
  to.add(sizes.data(), sizes.size(), c10::toString(tensor.scalar_type()), is_output);
}

void add(Operation& to, const Tensors& tensors, bool is_output) {
  for (const at::Tensor& each : tensors) add(to, each, is_output);
}

bool are_even(const Tensors& list) {
  return std::all_of(list.begin(), list.end(), [&](const at::Tensor& each) {
    return each.numel() == list.front().numel();
  });
}

// All tensors of a list as one.
void add_as_one(Operation& to, const Tensors& list, bool is_output) {
  if (list.empty()) return;
  const std::int64_t elements = std::accumulate(
      list.begin(), list.end(), std::int64_t{0},
      [](std::int64_t sum, const at::Tensor& each) { return sum + each.numel(); });
  to.add(&elements, 1, c10::toString(list.front().scalar_type()), is_output);
}

// A list that is uneven is the same in all ranks, and the single tensor is not.
void add_list(Operation& to, const Tensors& list, const at::Tensor& single,
              bool list_is_output, const char* uneven_name) {
  if (are_even(list)) {
    add_as_one(to, list, list_is_output);
    add(to, single, !list_is_output);
    return;
  }
  to.name = uneven_name;
  add(to, list, false);
  add(to, list, true);
}

// A factor may follow them.
Tensors first(const Tensors& inputs, std::size_t count) {
  const auto end =
      inputs.begin() + static_cast<std::ptrdiff_t>(std::min(count, inputs.size()));
  return {inputs.begin(), end};
}

void add_tensors(Operation& to, const Recording::Exchange& call, int size) {
  switch (call.type) {
    case OpType::BROADCAST:
    case OpType::ALLREDUCE:
    case OpType::ALLREDUCE_COALESCED:
    case OpType::REDUCE:
    case OpType::BARRIER:  // in place
      add(to, call.outputs, false);
      add(to, call.outputs, true);
      return;
    case OpType::ALLGATHER:
      return add_list(to, call.outputs, call.inputs.front(), true, "all_gather_v");
    case OpType::ALLGATHER_COALESCED:
      add(to, call.outputs, false);
      add(to, call.outputs, true);
      return;
    case OpType::REDUCE_SCATTER:
      return add_list(to, first(call.inputs, static_cast<std::size_t>(size)),
                      call.outputs.front(), false, "reduce_scatter_v");
    case OpType::_REDUCE_SCATTER_BASE:
    case OpType::REDUCE_SCATTER_TENSOR_COALESCED:
      add(to, first(call.inputs, call.outputs.size()), false);
      add(to, call.outputs, true);
      return;
    case OpType::ALLTOALL:
    case OpType::ALLTOALL_BASE:
    case OpType::GATHER:
    case OpType::SCATTER:
      add_as_one(to, call.inputs, false);
      add_as_one(to, call.outputs, true);
      return;
    default:
      add(to, call.inputs, false);
      add(to, call.outputs, true);
  }
}

}  // namespace

Recording::Open::~Open() { finish(tickets_, false); }

void Recording::finish(const std::vector<Ticket>& tickets, bool done) {
  const auto state = done ? recorder::State::kCompleted : recorder::State::kFailed;
  for (const Ticket each : tickets) trace::recorder().finish(each, state);
}

Recording::Recording(const c10d::Backend& group, std::vector<std::int64_t> ranks,
                     const std::string& prefix)
    : backend_(group), ranks_(std::move(ranks)) {
  trace::use_prefix(prefix);
  trace::listen();
}

void Recording::named() {
  const std::lock_guard<std::mutex> lock(mu_);
  group();
}

// Called with mu_ held, by which whoever describes the group is kept out too.
recorder::GroupPointer Recording::group() {
  const bool is_world = ranks_.empty();
  std::string description = backend_.getGroupDesc();
  if (description.empty()) description = is_world ? "default_pg" : "undefined";
  const int rank = backend_.getRank();
  const auto size = static_cast<std::size_t>(backend_.getSize());
  const bool same = group_ && group_->rank == rank && group_->ranks.size() == size;
  if (same) {
    if (description != described_) {
      described_ = description;
      trace::recorder().describe_group(group_, std::move(description));
    }
    return group_;
  }
  std::vector<std::int64_t> ranks = ranks_;
  if (ranks.size() != size) {
    ranks.resize(size);
    std::iota(ranks.begin(), ranks.end(), 0);
  }
  trace::use_rank(ranks.at(static_cast<std::size_t>(rank)));
  described_ = description;
  std::string name = backend_.getGroupUid();
  if (!generation_.empty()) name += "@" + generation_;
  group_ = trace::recorder().add_group(std::move(name), std::move(description),
                                       std::move(ranks), rank);
  collectives_ = point_to_point_ = calls_ = 0;
  for (Peers* peers : {&sent_, &received_, &signalled_, &waited_}) peers->clear();
  return group_;
}

void Recording::members_changed(const std::string& generation) {
  const std::lock_guard<std::mutex> lock(mu_);
  generation_ = generation;
  group_.reset();
  group();
}

Operation Recording::describe(const Exchange& call) const {
  Operation operation;
  operation.kind =
      is_point_to_point(call.type) ? Kind::kPointToPoint : Kind::kCollective;
  operation.name = name_of(call.type);
  operation.peer = call.peer;
  operation.tensors.reserve(2);
  operation.sizes.reserve(8);
  add_tensors(operation, call, backend_.getSize());
  return operation;
}

// Called with mu_ held.
void Recording::count(Operation& operation) {
  operation.group = group();
  operation.collective = collectives_;
  operation.point_to_point = point_to_point_;
  operation.call = ++calls_;
  operation.thread = this_thread();
  if (operation.kind != Kind::kPointToPoint || operation.peer < 0) return;
  Peers& peers = operation.name[0] == 's' ? sent_ : received_;
  operation.with_peer = ++peers[operation.peer];
}

std::vector<Ticket> Recording::begin(const std::vector<Exchange>& calls, bool counts,
                                     std::chrono::milliseconds timeout) {
  if (!trace::recorder().enabled()) return {};
  // Sizes and frames may take the GIL: before the lock.
  std::vector<Operation> operations;
  operations.reserve(calls.size() + 1);
  for (const Exchange& call : calls) operations.push_back(describe(call));
  if (calls.size() > 1) {
    Operation end;
    end.kind = counts ? Kind::kCollective : Kind::kPointToPoint;
    end.name = "coalesced";
    end.is_batch = true;
    operations.push_back(std::move(end));
  }
  const recorder::Frames frames = trace::frames();
  std::vector<Ticket> tickets;
  tickets.reserve(operations.size());
  const std::lock_guard<std::mutex> lock(mu_);
  group();  // counts anew, if it has other members
  ++(counts ? collectives_ : point_to_point_);
  for (Operation& operation : operations) {
    count(operation);
    operation.frames = frames;
    operation.timeout_ms = timeout.count();
    tickets.push_back(trace::recorder().record(std::move(operation)));
  }
  return tickets;
}

std::vector<Ticket> Recording::begin_one_sided(const char* name,
                                               const std::vector<OneSided>& calls,
                                               std::chrono::milliseconds timeout) {
  std::vector<Ticket> tickets;
  if (!trace::recorder().enabled()) return tickets;
  const recorder::Frames frames = trace::frames();
  const bool waits = name[0] == 'w';
  const std::lock_guard<std::mutex> lock(mu_);
  for (const OneSided& call : calls) {
    Operation operation;
    operation.kind = Kind::kOneSided;
    operation.name = name;
    operation.peer = call.peer;
    operation.offset = call.offset;
    operation.bytes = call.bytes;
    operation.timeout_ms = timeout.count();
    operation.frames = frames;
    count(operation);
    operation.with_peer = (waits ? waited_ : signalled_)[call.peer] += call.signals;
    tickets.push_back(trace::recorder().record(std::move(operation)));
  }
  return tickets;
}

Ticket Recording::begin_membership(const char* name,
                                   std::chrono::milliseconds timeout) {
  if (!trace::recorder().enabled()) return recorder::kNoTicket;
  Operation operation;
  operation.kind = Kind::kMembership;
  operation.name = name;
  operation.timeout_ms = timeout.count();
  operation.frames = trace::frames();
  const std::lock_guard<std::mutex> lock(mu_);
  count(operation);
  return trace::recorder().record(std::move(operation));
}

}  // namespace weightsync
