// How operations are issued: alone, or as a batch in one group of NCCL.
//
// All that is wrong with a call is found before anything is issued. What runs on the
// internal stream comes after what the caller's stream had at that time.
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <utility>

#include "backend/nccl/nccl_group.h"
#include "backend/nccl/process_group_nccl.h"
#include "backend/nccl/raising.h"

namespace weightsync {
namespace {

void check_tensor(const at::Tensor& tensor, c10::Device device, const char* call) {
  TORCH_CHECK_VALUE(tensor.defined(), call, ": a tensor is undefined");
  TORCH_CHECK_VALUE(!tensor.is_sparse(), call, ": tensors must be dense");
  TORCH_CHECK_VALUE(tensor.device() == device, call, ": expected tensors on ", device,
                    ", found one on ", tensor.device());
  elements_of(tensor.scalar_type());
}

bool all_in(const std::vector<const ProcessGroupNccl::Tensors*>& lists,
            at::MemoryFormat format) {
  for (const auto* const list : lists) {
    for (const at::Tensor& each : *list) {
      if (!each.is_contiguous(format)) return false;
    }
  }
  return true;
}

// Elements are moved in the order of memory, which has to be the same in all tensors
// of a call, and in all ranks.
void check_order(const ProcessGroupNccl::Tensors& inputs,
                 const ProcessGroupNccl::Tensors& outputs, const char* call) {
  if (all_in({&inputs, &outputs}, at::MemoryFormat::Contiguous) ||
      all_in({&inputs, &outputs}, at::MemoryFormat::ChannelsLast) ||
      all_in({&inputs, &outputs}, at::MemoryFormat::ChannelsLast3d)) {
    return;
  }
  for (const auto* const list : {&inputs, &outputs}) {
    for (const at::Tensor& each : *list) {
      TORCH_CHECK_VALUE(each.is_contiguous(each.suggest_memory_format()), call,
                        ": tensors must be contiguous; found sizes ", each.sizes(),
                        " with strides ", each.strides());
    }
  }
  TORCH_CHECK_VALUE(false, call,
                    ": all tensors must be contiguous in the same memory format");
}

ProcessGroupNccl::Tensors joined(ProcessGroupNccl::Tensors inputs,
                                 const ProcessGroupNccl::Tensors& outputs) {
  inputs.insert(inputs.end(), outputs.begin(), outputs.end());
  return inputs;
}

}  // namespace

c10::Device ProcessGroupNccl::device_of(const Call& call) const {
  for (const Tensors* tensors : {&call.inputs, &call.outputs}) {
    for (const at::Tensor& each : *tensors) {
      if (!each.defined()) continue;
      TORCH_CHECK_VALUE(each.is_cuda(), call.name,
                        ": expected CUDA tensors, found one on ", each.device());
      return each.device();
    }
  }
  TORCH_CHECK_VALUE(false, call.name, ": there is no tensor");
}

c10::Device ProcessGroupNccl::barrier_device(const c10d::BarrierOptions& opts) const {
  if (opts.device && opts.device->is_cuda()) return *opts.device;
  if (!opts.device_ids.empty()) {
    return {c10::kCUDA, static_cast<c10::DeviceIndex>(opts.device_ids.front())};
  }
  {
    const std::lock_guard<std::mutex> lock(mu_);
    if (session_) return session_->device();
  }
  if (const auto bound = getBoundDeviceId()) return *bound;
  return current_device();
}

ProcessGroupNccl::WorkPointer ProcessGroupNccl::issue(Call call, Launch launch) {
  const c10::Device device = device_of(call);
  for (const Tensors* tensors : {&call.inputs, &call.outputs}) {
    for (const at::Tensor& each : *tensors) check_tensor(each, device, call.name);
  }
  check_order(call.inputs, call.outputs, call.name);
  if (!batch_) return issue_now(std::move(call), &launch, 1);
  Call& all = batch_->call;
  if (!batch_->launches.empty()) {
    TORCH_CHECK_VALUE(device_of(all) == device, call.name,
                      ": all tensors of a batch must be on one device");
  }
  all.inputs.insert(all.inputs.end(), call.inputs.begin(), call.inputs.end());
  all.outputs.insert(all.outputs.end(), call.outputs.begin(), call.outputs.end());
  all.async = call.async;
  all.timeout = std::max(all.timeout, call.timeout);
  all.counts = all.counts || call.counts;
  all.blocks_host = all.blocks_host || call.blocks_host;
  batch_->launches.push_back(std::move(launch));
  batch_->calls.push_back(std::move(call));
  return nullptr;
}

ProcessGroupNccl::WorkPointer ProcessGroupNccl::issue_now(
    Call call, const Launch* launches, std::size_t count,
    const std::vector<Call>& calls) {
  const c10::Device device = device_of(call);
  Recording::Open recorded(record(call, calls));
  return issue_on(session(device), std::move(call), launches, count, recorded);
}

ProcessGroupNccl::WorkPointer ProcessGroupNccl::issue_on(
    const std::shared_ptr<Session>& session, Call call, const Launch* launches,
    std::size_t count, Recording::Open& recorded) {
  const c10::Device device = session->device();
  const c10::DeviceGuard on(device);
  const c10::Stream current = current_stream(device);
  const c10::Stream stream = call.async ? session->stream() : current;
  if (call.async) {
    c10::Event ready = session->take_event();
    ready.record(current);
    ready.block(stream);
    session->give_back(std::move(ready));
  }
  nccl::Communicator& communicator = session->communicator();
  Issued issued;
  // Asked before anything is issued: that may fail.
  issued.captured = is_captured(current);
  const Timeouts::Given time = timeouts_->give(call.timeout);
  if (timing_) {
    issued.begin = timed_event();
    issued.begin->record(stream);
  }
  bool begun = false;
  try {
    const std::lock_guard<std::timed_mutex> issuing(communicator.issuing());
    session->check();
    begun = true;
    const Session::Calling calling(*session, call.name, shm::after(time.timeout));
    if (call.grouped || count > 1) {
      NcclGroup group(communicator.library());
      for (std::size_t each = 0; each < count; ++each) {
        launches[each](communicator, handle_of(stream));
      }
      group.end();
    } else {
      launches[0](communicator, handle_of(stream));
    }
  } catch (...) {
    timeouts_->over(time.extension);
    // The stream of the caller is in order with what becomes of the tensors.
    if (begun && call.async && !issued.captured) {
      leave(session, std::move(call), stream, time.timeout);
    }
    session->check();  // An end that came meanwhile is the reason.
    throw;
  }
  issued.type = call.type;
  issued.name = call.name;
  issued.sequence = call.counts ? ++sequence_ : sequence_.load();
  if (call.async) issued.kept = joined(std::move(call.inputs), call.outputs);
  issued.results = std::move(call.outputs);
  issued.timeout = time.timeout;
  if (time.extension > kNoTimeout) {
    issued.timeouts = timeouts_;
    issued.extension = time.extension;
  }
  issued.blocks_host = call.blocks_host || options_->blocking_wait;
  issued.recorded = recorded.keep();
  auto work = c10::make_intrusive<WorkNccl>(session, std::move(issued), stream);
  const std::shared_ptr<Operation>& operation = work->operation();
  try {
    operation->mark_end();
  } catch (...) {
    if (!operation->captured()) watchdog_->keep(operation);
    throw;
  }
  if (!operation->captured()) watchdog_->add(operation);
  return work;
}

void ProcessGroupNccl::leave(const std::shared_ptr<Session>& session, Call call,
                             const c10::Stream& stream,
                             std::chrono::milliseconds timeout) {
  Issued left;
  left.name = call.name;
  left.sequence = sequence_;
  left.kept = joined(std::move(call.inputs), call.outputs);
  left.timeout = timeout;
  const auto operation = std::make_shared<Operation>(session, std::move(left), stream);
  try {
    operation->mark_end();
  } catch (const std::exception&) {
    // It has no end that could be seen: its communicator has one.
  }
  watchdog_->keep(operation);
}

std::vector<recorder::Ticket> ProcessGroupNccl::record(const Call& call,
                                                       const std::vector<Call>& calls) {
  const auto timeout = timeout_or_default(call.timeout);
  if (!call.one_sided.empty()) {
    return recording_.begin_one_sided(call.name, call.one_sided, timeout);
  }
  if (call.type == c10d::OpType::UNKNOWN) return {};
  std::vector<Recording::Exchange> exchanges;
  for (const Call& each : calls) {
    exchanges.push_back({each.type, each.inputs, each.outputs, each.peer});
  }
  if (calls.empty()) {
    exchanges.push_back({call.type, call.inputs, call.outputs, call.peer});
  }
  return recording_.begin(exchanges, call.counts, timeout);
}

ProcessGroupNccl::WorkPointer ProcessGroupNccl::refused() {
  if (!batch_) throw;
  if (!batch_->refused) batch_->refused = std::current_exception();
  return nullptr;
}

void ProcessGroupNccl::startCoalescing() {
  // c10d refuses some tensors itself, and comes to no end then.
  const std::size_t lost = batch_ ? batch_->launches.size() : 0;
  batch_.reset();
  TORCH_CHECK(lost == 0, "a batch of ", lost,
              " operations was never ended: none of them was issued; it is given up");
  batch_.emplace();
  batch_->call.type = c10d::OpType::COALESCED;
  batch_->call.name = "a batch";
  batch_->call.counts = false;
}

ProcessGroupNccl::WorkPointer ProcessGroupNccl::endCoalescing() {
  TORCH_CHECK(batch_, "endCoalescing: no batch is open");
  Batch batch = std::move(*batch_);
  batch_.reset();
  if (batch.refused) std::rethrow_exception(batch.refused);
  if (batch.launches.empty()) return nullptr;
  return issue_now(std::move(batch.call), batch.launches.data(), batch.launches.size(),
                   batch.calls);
}

}  // namespace weightsync
