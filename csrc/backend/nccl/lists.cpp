// The collectives whose parts may differ in size: groups of smaller operations,
// straight from and into the tensors of the caller.
#include <numeric>

#include "backend/nccl/nccl_call.h"
#include "backend/nccl/process_group_nccl.h"

namespace weightsync {
namespace {

using c10d::OpType;
using Tensors = ProcessGroupNccl::Tensors;

const at::Tensor& only(const Tensors& tensors, const char* call) {
  TORCH_CHECK_VALUE(tensors.size() == 1, call, ": expected one tensor, found ",
                    tensors.size());
  return tensors.front();
}

const Tensors& only(const std::vector<Tensors>& lists, const char* call) {
  TORCH_CHECK_VALUE(lists.size() == 1, call, ": expected one list of tensors, found ",
                    lists.size());
  return lists.front();
}

// One tensor for each rank, all of one dtype.
void check_list(const Tensors& list, const char* what, const at::Tensor& other,
                int size, const char* call) {
  TORCH_CHECK_VALUE(list.size() == static_cast<std::size_t>(size), call, ": expected ",
                    size, " ", what, ", one for each rank, found ", list.size());
  for (const at::Tensor& each : list) check_same_dtype(each, other, call);
}

void check_same_size(const at::Tensor& one, const at::Tensor& other, const char* call) {
  TORCH_CHECK_VALUE(one.numel() == other.numel(), call, ": what this rank gives has ",
                    one.numel(), " elements, and the place for it ", other.numel());
}

// A part of a tensor in elements, along its first dimension.
struct Part {
  std::int64_t offset = 0;
  std::int64_t count = 0;
};

std::vector<Part> parts_of(const at::Tensor& tensor,
                           const std::vector<std::int64_t>& splits, int size,
                           const char* call) {
  const std::int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  const std::int64_t row = rows == 0 ? 0 : tensor.numel() / rows;
  std::vector<std::int64_t> counts = splits;
  if (counts.empty()) {
    TORCH_CHECK_VALUE(rows % size == 0, call, ": the first dimension is ", rows,
                      ", which ", size, " ranks cannot share evenly");
    counts.assign(static_cast<std::size_t>(size), rows / size);
  }
  TORCH_CHECK_VALUE(counts.size() == static_cast<std::size_t>(size), call,
                    ": expected ", size, " splits, one for each rank, found ",
                    counts.size());
  TORCH_CHECK_VALUE(
      std::accumulate(counts.begin(), counts.end(), std::int64_t{0}) == rows, call,
      ": the splits do not add up to the first dimension, ", rows);
  std::vector<Part> parts;
  std::int64_t offset = 0;
  for (const std::int64_t count : counts) {
    TORCH_CHECK_VALUE(count >= 0, call, ": a split is negative: ", count);
    parts.push_back({offset * row, count * row});
    offset += count;
  }
  return parts;
}

// What goes to or comes from a peer.
struct Message {
  std::byte* data = nullptr;
  std::size_t count = 0;  // elements of NCCL
  int peer = 0;
};

Message message(const at::Tensor& tensor, Part part, int peer) {
  auto* const base = static_cast<std::byte*>(tensor.data_ptr());
  const auto each = elements_of(tensor.scalar_type()).each;
  return {base == nullptr ? nullptr : base + part.offset * tensor.element_size(),
          static_cast<std::size_t>(part.count) * each, peer};
}

Message message(const at::Tensor& tensor, int peer) {
  return message(tensor, {0, tensor.numel()}, peer);
}

void exchange(nccl::Communicator& on, cudaStream_t stream, ncclDataType_t type,
              const std::vector<Message>& sent, const std::vector<Message>& received) {
  for (const Message& each : sent) {
    if (each.count == 0) continue;
    check_call(on,
               on.library().ncclSend(each.data, each.count, type, each.peer,
                                     on.handle(), stream),
               "ncclSend");
  }
  for (const Message& each : received) {
    if (each.count == 0) continue;
    check_call(on,
               on.library().ncclRecv(each.data, each.count, type, each.peer,
                                     on.handle(), stream),
               "ncclRecv");
  }
}

std::vector<Message> messages(const Tensors& list) {
  std::vector<Message> all;
  for (std::size_t rank = 0; rank < list.size(); ++rank) {
    all.push_back(message(list[rank], static_cast<int>(rank)));
  }
  return all;
}

std::vector<Message> messages(const at::Tensor& tensor,
                              const std::vector<Part>& parts) {
  std::vector<Message> all;
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    all.push_back(message(tensor, parts[rank], static_cast<int>(rank)));
  }
  return all;
}

// Every rank gives its input, which lands in the output of its rank.
void gather_all(nccl::Communicator& on, cudaStream_t stream, const at::Tensor& input,
                const Tensors& outputs) {
  for (int root = 0; root < on.size(); ++root) {
    const at::Tensor& output = outputs[static_cast<std::size_t>(root)];
    const at::Tensor& source = root == on.rank() ? input : output;
    check_call(on,
               on.library().ncclBroadcast(source.data_ptr(), output.data_ptr(),
                                          count_of(output), type_of(output), root,
                                          on.handle(), stream),
               "ncclBroadcast");
  }
}

}  // namespace

ProcessGroupNccl::WorkPointer ProcessGroupNccl::allgather(
    std::vector<Tensors>& outputs, Tensors& inputs,
    const c10d::AllgatherOptions& opts) try {
  constexpr const char* kCall = "all_gather";
  const at::Tensor input = only(inputs, kCall);
  const Tensors list = only(outputs, kCall);
  check_list(list, "outputs", input, size_, kCall);
  check_same_size(input, list[static_cast<std::size_t>(rank_)], kCall);
  return issue({OpType::ALLGATHER, kCall, {input}, list, opts.asyncOp, opts.timeout},
               [input, list](nccl::Communicator& on, cudaStream_t stream) {
                 gather_all(on, stream, input, list);
               });
} catch (...) {
  return refused();
}

// outputs[r][i] is input i of rank r.
ProcessGroupNccl::WorkPointer ProcessGroupNccl::allgather_coalesced(
    std::vector<Tensors>& outputs, Tensors& inputs,
    const c10d::AllgatherOptions& opts) try {
  constexpr const char* kCall = "all_gather_coalesced";
  TORCH_CHECK_VALUE(outputs.size() == static_cast<std::size_t>(size_), kCall,
                    ": expected ", size_,
                    " lists of outputs, one for each rank, found ", outputs.size());
  std::vector<Tensors> lists(inputs.size());
  Tensors all;
  for (const Tensors& of_rank : outputs) {
    TORCH_CHECK_VALUE(of_rank.size() == inputs.size(), kCall, ": ", inputs.size(),
                      " inputs, and a rank with ", of_rank.size(), " outputs");
    for (std::size_t each = 0; each < inputs.size(); ++each) {
      lists[each].push_back(of_rank[each]);
      all.push_back(of_rank[each]);
    }
  }
  for (std::size_t each = 0; each < inputs.size(); ++each) {
    check_list(lists[each], "outputs", inputs[each], size_, kCall);
    check_same_size(inputs[each], lists[each][static_cast<std::size_t>(rank_)], kCall);
  }
  return issue(
      {OpType::ALLGATHER_COALESCED, kCall, inputs, all, opts.asyncOp, opts.timeout},
      [inputs, lists](nccl::Communicator& on, cudaStream_t stream) {
        for (std::size_t each = 0; each < inputs.size(); ++each) {
          gather_all(on, stream, inputs[each], lists[each]);
        }
      });
} catch (...) {
  return refused();
}

ProcessGroupNccl::WorkPointer ProcessGroupNccl::reduce_scatter(
    Tensors& outputs, std::vector<Tensors>& inputs,
    const c10d::ReduceScatterOptions& opts) try {
  constexpr const char* kCall = "reduce_scatter";
  const at::Tensor output = only(outputs, kCall);
  const Tensors list = only(inputs, kCall);
  check_list(list, "inputs", output, size_, kCall);
  check_same_size(list[static_cast<std::size_t>(rank_)], output, kCall);
  check_reduction(opts.reduceOp, output.scalar_type());
  Call call{OpType::REDUCE_SCATTER, kCall, list, {output}, opts.asyncOp, opts.timeout};
  keep_factor(opts.reduceOp, call.inputs);
  return issue(std::move(call), [output, list, reduction = opts.reduceOp](
                                    nccl::Communicator& on, cudaStream_t stream) {
    const Reduction op(reduction, output.scalar_type(), on);
    for (int root = 0; root < on.size(); ++root) {
      const at::Tensor& input = list[static_cast<std::size_t>(root)];
      check_call(
          on,
          on.library().ncclReduce(input.data_ptr(), output.data_ptr(), count_of(input),
                                  type_of(input), op.get(), root, on.handle(), stream),
          "ncclReduce");
    }
  });
} catch (...) {
  return refused();
}

ProcessGroupNccl::WorkPointer ProcessGroupNccl::all_to_all_single(
    at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
    std::vector<std::int64_t>& input_splits, const c10d::AllToAllOptions& opts) try {
  constexpr const char* kCall = "all_to_all_single";
  check_same_dtype(input, output, kCall);
  const auto sent = messages(input, parts_of(input, input_splits, size_, kCall));
  const auto received = messages(output, parts_of(output, output_splits, size_, kCall));
  return issue(
      {OpType::ALLTOALL_BASE, kCall, {input}, {output}, opts.asyncOp, opts.timeout},
      [type = type_of(input), sent, received](nccl::Communicator& on,
                                              cudaStream_t stream) {
        exchange(on, stream, type, sent, received);
      });
} catch (...) {
  return refused();
}

ProcessGroupNccl::WorkPointer ProcessGroupNccl::alltoall(
    Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) try {
  constexpr const char* kCall = "all_to_all";
  TORCH_CHECK_VALUE(!inputs.empty(), kCall, ": there is no tensor");
  check_list(inputs, "inputs", inputs.front(), size_, kCall);
  check_list(outputs, "outputs", inputs.front(), size_, kCall);
  return issue({OpType::ALLTOALL, kCall, inputs, outputs, opts.asyncOp, opts.timeout},
               [type = type_of(inputs.front()), inputs, outputs](nccl::Communicator& on,
                                                                 cudaStream_t stream) {
                 exchange(on, stream, type, messages(inputs), messages(outputs));
               });
} catch (...) {
  return refused();
}

ProcessGroupNccl::WorkPointer ProcessGroupNccl::gather(
    std::vector<Tensors>& outputs, Tensors& inputs,
    const c10d::GatherOptions& opts) try {
  constexpr const char* kCall = "gather";
  const at::Tensor input = only(inputs, kCall);
  check_root(opts.rootRank, size_, kCall);
  const int root = static_cast<int>(opts.rootRank);
  Tensors list;
  if (rank_ == root) {
    list = only(outputs, kCall);
    check_list(list, "outputs", input, size_, kCall);
    check_same_size(input, list[static_cast<std::size_t>(rank_)], kCall);
  } else {
    TORCH_CHECK_VALUE(outputs.empty() || outputs.front().empty(), kCall,
                      ": only the root, rank ", root, ", gives outputs");
  }
  return issue({OpType::GATHER, kCall, {input}, list, opts.asyncOp, opts.timeout},
               [input, list, root](nccl::Communicator& on, cudaStream_t stream) {
                 exchange(on, stream, type_of(input), {message(input, root)},
                          messages(list));
               });
} catch (...) {
  return refused();
}

ProcessGroupNccl::WorkPointer ProcessGroupNccl::gather_single(
    at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) try {
  constexpr const char* kCall = "gather_single";
  check_root(opts.rootRank, size_, kCall);
  const int root = static_cast<int>(opts.rootRank);
  std::vector<Message> received;
  Tensors outputs;
  if (rank_ == root) {
    check_shares(output, input, size_, kCall);
    for (int rank = 0; rank < size_; ++rank) {
      received.push_back(message(output, {rank * input.numel(), input.numel()}, rank));
    }
    outputs.push_back(output);
  }
  return issue({OpType::GATHER, kCall, {input}, outputs, opts.asyncOp, opts.timeout},
               [input, received, root](nccl::Communicator& on, cudaStream_t stream) {
                 exchange(on, stream, type_of(input), {message(input, root)}, received);
               });
} catch (...) {
  return refused();
}

ProcessGroupNccl::WorkPointer ProcessGroupNccl::scatter(
    Tensors& outputs, std::vector<Tensors>& inputs,
    const c10d::ScatterOptions& opts) try {
  constexpr const char* kCall = "scatter";
  const at::Tensor output = only(outputs, kCall);
  check_root(opts.rootRank, size_, kCall);
  const int root = static_cast<int>(opts.rootRank);
  Tensors list;
  if (rank_ == root) {
    list = only(inputs, kCall);
    check_list(list, "inputs", output, size_, kCall);
    check_same_size(list[static_cast<std::size_t>(rank_)], output, kCall);
  } else {
    TORCH_CHECK_VALUE(inputs.empty() || inputs.front().empty(), kCall,
                      ": only the root, rank ", root, ", gives inputs");
  }
  return issue({OpType::SCATTER, kCall, list, {output}, opts.asyncOp, opts.timeout},
               [output, list, root](nccl::Communicator& on, cudaStream_t stream) {
                 exchange(on, stream, type_of(output), messages(list),
                          {message(output, root)});
               });
} catch (...) {
  return refused();
}

}  // namespace weightsync
