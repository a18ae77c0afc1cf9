#include "backend/nccl/window_nccl.h"

#include <climits>
#include <string>
#include <utility>

#include "backend/nccl/memory_nccl.h"
#include "backend/nccl/nccl_call.h"
#include "backend/nccl/runs_nccl.h"

namespace weightsync {
namespace {

using shm::Code;

// One call of NCCL, in bytes: dtypes mean nothing to a put.
struct Put {
  const std::byte* source = nullptr;
  std::size_t nbytes = 0;
  std::size_t offset = 0;
};

void launch_signals(nccl::Communicator& on, cudaStream_t stream, int peer,
                    std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    check_call(on, on.library().ncclSignal(peer, 0, 0, 0, on.handle(), stream),
               "ncclSignal");
  }
}

void launch_put(nccl::Communicator& on, cudaStream_t stream, const Put& put, int peer,
                ncclWindow_t handle) {
  check_call(on,
             on.library().ncclPutSignal(put.source, put.nbytes, ncclUint8, peer, handle,
                                        put.offset, 0, 0, 0, on.handle(), stream),
             "ncclPutSignal");
}

void append_puts(const RunNccl& run, std::size_t start, std::vector<Put>& puts) {
  if (run.is_one_piece()) {
    puts.push_back({run.at_tensor, run.rows * run.row_bytes, start + run.at_window});
    return;
  }
  for (std::size_t row = 0; row < run.rows; ++row) {
    puts.push_back({run.at_tensor + row * run.tensor_stride, run.row_bytes,
                    start + run.at_window + row * run.window_stride});
  }
}

}  // namespace

c10::intrusive_ptr<c10d::Window> ProcessGroupNccl::new_window(
    const std::optional<at::Tensor>& tensor) {
  // A tensor on another device is refused by all ranks together, which meet for that.
  auto session = session_if_any();
  if (!session) {
    const bool on_device = tensor && tensor->defined() && tensor->is_cuda();
    session = this->session(on_device ? tensor->device() : barrier_device({}));
  }
  auto self = c10::intrusive_ptr<ProcessGroupNccl>::unsafe_reclaim_from_nonowning(this);
  auto window = c10::make_intrusive<WindowNccl>(
      c10::weak_intrusive_ptr<ProcessGroupNccl>(self), session);
  if (tensor) window->tensor_register(*tensor);
  return window;
}

at::Tensor ProcessGroupNccl::allocateTensor(long size, at::TensorOptions options) {
  return allocate_nccl_tensor(size, options);
}

WindowNccl::WindowNccl(c10::weak_intrusive_ptr<ProcessGroupNccl> group,
                       std::shared_ptr<Session> session)
    : group_(std::move(group)), session_(std::move(session)) {}

// --- what is asked of the others ---

void WindowNccl::tensor_register(const at::Tensor& tensor, bool owning) {
  const auto group = open();
  {
    const std::lock_guard<std::mutex> lock(mu_);
    check(places_.empty(), Code::kInvalid,
          "tensor_register: this window has a tensor already");
  }
  auto places = register_tensor(meeting(*group), tensor);
  const std::lock_guard<std::mutex> lock(mu_);
  places_ = std::move(places);
  memory_ = static_cast<std::byte*>(tensor.data_ptr());
  if (owning) tensor_ = tensor;
}

void WindowNccl::tensor_deregister() {
  at::Tensor dropped;  // After the lock: a tensor may want the GIL.
  {
    const std::lock_guard<std::mutex> lock(mu_);
    check(!places_.empty(), Code::kInvalid,
          "tensor_deregister: this window has no tensor");
    places_.clear();
    memory_ = nullptr;
    std::swap(tensor_, dropped);
  }
  const auto group = open();
  meet_all(meeting(*group));
}

Meeting WindowNccl::meeting(const ProcessGroupNccl& group) const {
  // Members that reconfigure() brought together have no store in common.
  return {session_, group.watchdog(), shm::after(group.timeout_or_default(kNoTimeout)),
          group.elastic_ ? nullptr : group.store_};
}

// --- one-sided ---

WindowNccl::WorkPointer WindowNccl::put(const at::Tensor& tensor, int64_t dst,
                                        int64_t offset, bool async_op,
                                        const c10d::PutOptions& opts) {
  const auto group = open();
  const int peer = checked(dst, "put");
  const Place place = place_of(peer);
  check(tensor.defined() && tensor.device() == session_->device(), Code::kInvalid, [&] {
    return c10::str("put: expected a tensor on ", session_->device(), ", found ",
                    tensor.defined() ? tensor.device().str() : "none");
  });
  check(tensor.is_contiguous(), Code::kInvalid, "put: the tensor must be contiguous");
  const auto dtype = static_cast<at::ScalarType>(place.dtype);
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, "put of ", tensor.scalar_type(),
                   " into the window of rank ", peer, ", which is of ", dtype);
  const auto nbytes = static_cast<std::int64_t>(tensor.nbytes());
  std::int64_t at = 0;
  const bool inside =
      offset >= 0 &&
      !__builtin_mul_overflow(offset, static_cast<std::int64_t>(tensor.element_size()),
                              &at) &&
      fits(at, 1, nbytes, 0, static_cast<std::uint64_t>(place.nbytes)) &&
      at <= place.nbytes;
  check(inside, Code::kInvalid, [&] {
    return c10::str("put of ", nbytes, " bytes at element ", offset,
                    " leaves the window of rank ", peer, ", which has ", place.nbytes,
                    " bytes");
  });
  Call call;
  call.name = "put";
  call.one_sided = {{peer, 1, at, nbytes}};
  call.grouped = false;
  call.inputs = {tensor};
  call.async = async_op;
  call.timeout = opts.timeout;
  if (nbytes == 0) {
    // NCCL takes no put without an address.
    return issue(std::move(call), {[peer](nccl::Communicator& on, cudaStream_t stream) {
                   launch_signals(on, stream, peer, 1);
                 }});
  }
  check_source(tensor, "put");
  const Target target = target_of(place, peer);
  const Put put{static_cast<const std::byte*>(tensor.const_data_ptr()),
                static_cast<std::size_t>(nbytes),
                target.start + static_cast<std::size_t>(at)};
  check_target(target, put.offset, put.nbytes);
  return issue(std::move(call),
               {[put, target](nccl::Communicator& on, cudaStream_t stream) {
                 launch_put(on, stream, put, target.peer, target.handle);
               }});
}

WindowNccl::WorkPointer WindowNccl::put_many(std::vector<at::Tensor> tensors,
                                             const at::Tensor& table, int64_t dst,
                                             int64_t signals, bool async_op) {
  const auto group = open();
  const int peer = checked(dst, "put_many");
  const Place place = place_of(peer);
  const auto runs = resolve_runs(tensors, table, place.nbytes, session_->device());
  std::vector<bool> used(tensors.size());
  std::vector<Put> puts;
  Target target;
  for (const RunNccl& run : runs) {
    if (run.empty()) continue;
    if (target.handle == nullptr) target = target_of(place, peer);
    if (!used[run.tensor]) check_source(tensors[run.tensor], "put_many");
    used[run.tensor] = true;
    append_puts(run, target.start, puts);
  }
  for (const Put& put : puts) check_target(target, put.offset, put.nbytes);
  const auto count = static_cast<std::int64_t>(puts.size());
  check(signals >= count, Code::kInvalid, [&] {
    return "put_many: NCCL signals once for each put, and these runs are " +
           std::to_string(count) + " puts; they cannot send " +
           std::to_string(signals) + " signals";
  });
  Call call;
  call.name = "put_many";
  call.one_sided = {{peer, signals}};
  for (const Put& put : puts) {
    call.one_sided.front().bytes += static_cast<std::int64_t>(put.nbytes);
  }
  call.inputs = std::move(tensors);
  call.async = async_op;
  return issue(std::move(call),
               {[puts = std::move(puts), target, peer, rest = signals - count](
                    nccl::Communicator& on, cudaStream_t stream) {
                 for (const Put& put : puts) {
                   launch_put(on, stream, put, peer, target.handle);
                 }
                 launch_signals(on, stream, peer, rest);
               }});
}

WindowNccl::WorkPointer WindowNccl::signal(int64_t dst, bool async_op,
                                           const c10d::SignalOptions& opts) {
  const auto group = open();
  const int peer = checked(dst, "signal");
  place_of(peer);
  Call call;
  call.name = "signal";
  call.one_sided = {{peer}};
  call.grouped = false;
  call.async = async_op;
  call.timeout = opts.timeout;
  return issue(std::move(call), {[peer](nccl::Communicator& on, cudaStream_t stream) {
                 launch_signals(on, stream, peer, 1);
               }});
}

WindowNccl::WorkPointer WindowNccl::wait_signal(int64_t peer, bool async_op,
                                                const c10d::WaitSignalOptions& opts) {
  return wait_signals({peer}, {1}, opts.timeout, async_op);
}

WindowNccl::WorkPointer WindowNccl::wait_signals(const std::vector<int64_t>& peers,
                                                 const std::vector<int64_t>& counts,
                                                 std::chrono::milliseconds timeout,
                                                 bool async_op) {
  const auto group = open();
  check(peers.size() == counts.size(), Code::kInvalid, [&] {
    return c10::str("wait_signals needs one count for each peer; found ", peers.size(),
                    " peers and ", counts.size(), " counts");
  });
  std::vector<ncclWaitSignalDesc_t> expected;
  for (std::size_t i = 0; i < peers.size(); ++i) {
    const int peer = checked(peers[i], "wait_signal");
    place_of(peer);
    check(counts[i] >= 0 && counts[i] <= INT_MAX, Code::kInvalid, [&] {
      return c10::str("cannot wait for ", counts[i], " signals of rank ", peer);
    });
    if (counts[i] > 0) expected.push_back({static_cast<int>(counts[i]), peer, 0, 0});
  }
  Call call;
  call.name = "wait_signal";
  call.grouped = false;
  for (const ncclWaitSignalDesc_t& each : expected) {
    call.one_sided.push_back({each.peer, each.opCnt});
  }
  call.async = async_op;
  call.timeout = timeout;
  return issue(
      std::move(call),
      {[expected = std::move(expected)](nccl::Communicator& on, cudaStream_t stream) {
        if (expected.empty()) return;
        auto list = expected;
        check_call(on,
                   on.library().ncclWaitSignal(static_cast<int>(list.size()),
                                               list.data(), on.handle(), stream),
                   "ncclWaitSignal");
      }});
}

// --- of this rank ---

WindowNccl::WorkPointer WindowNccl::copy_local(std::vector<at::Tensor> tensors,
                                               const at::Tensor& table, bool to_window,
                                               bool async_op) {
  const auto group = open();
  const Place place = place_of(session_->rank());
  auto runs = resolve_runs(tensors, table, place.nbytes, session_->device(),
                           to_window ? Sides::kDeviceOrHost : Sides::kDevice);
  std::byte* memory = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    memory = memory_;
    if (tensor_.defined()) tensors.push_back(tensor_);
  }
  Call call;
  call.name = "copy_local";
  call.inputs = std::move(tensors);
  call.async = async_op;
  return issue(std::move(call), {[runs = std::move(runs), memory, to_window](
                                     nccl::Communicator&, cudaStream_t stream) {
                 for (const RunNccl& run : runs) {
                   if (run.empty()) continue;
                   std::byte* const window = memory + run.at_window;
                   if (to_window) {
                     copy_rows(window, run.window_stride, run.at_tensor,
                               run.tensor_stride, run, run.kind(), stream);
                   } else {
                     copy_rows(run.at_tensor, run.tensor_stride, window,
                               run.window_stride, run, run.kind(), stream);
                   }
                 }
               }});
}

at::Tensor WindowNccl::map_remote_tensor(int64_t rank) {
  open();
  const int found = checked(rank, "map_remote_tensor");
  place_of(found);
  check(found == session_->rank(), Code::kUnsupported, [&] {
    return "windows are in SEPARATE mode: the memory of rank " + std::to_string(rank) +
           " cannot be read by rank " + std::to_string(session_->rank());
  });
  const std::lock_guard<std::mutex> lock(mu_);
  check(tensor_.defined(), Code::kInvalid,
        "map_remote_tensor: this window does not own its tensor");
  return tensor_;
}

c10d::WindowAttr WindowNccl::get_attr(int64_t peer) {
  open();
  place_of(checked(peer, "get_attr"));
  return {c10d::WindowAccessType::SEPARATE};
}

void WindowNccl::connect(const std::vector<int64_t>& peers) {
  open();
  for (const int64_t peer : peers) place_of(checked(peer, "connect"));
}

void WindowNccl::prepare(const at::Tensor& runs, int64_t dst) {
  open();
  const Place place = place_of(checked(dst, "prepare"));
  check_table(runs);
  const auto* row = runs.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < runs.size(0); ++i, row += kRunColumns) {
    check(
        fits(row[2], row[3], row[4], row[6], static_cast<std::uint64_t>(place.nbytes)),
        Code::kInvalid,
        [&] { return "run " + std::to_string(i) + " leaves the window"; });
  }
}

int64_t WindowNccl::peer_nbytes(int64_t peer) {
  open();
  return place_of(checked(peer, "peer_nbytes")).nbytes;
}

WindowNccl::WorkPointer WindowNccl::issue(Call call,
                                          const std::vector<Launch>& launches) {
  call.counts = false;
  const auto group = open();
  Recording::Open recorded(group->record(call, {}));
  return group->issue_on(session_, std::move(call), launches.data(), launches.size(),
                         recorded);
}

}  // namespace weightsync
