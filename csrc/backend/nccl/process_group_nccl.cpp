#include "backend/nccl/process_group_nccl.h"

#include <c10/core/DeviceGuard.h>

#include <utility>

#include "backend/nccl/bootstrap.h"
#include "backend/nccl/nccl_group.h"
#include "backend/nccl/raising.h"

namespace weightsync {
namespace {

using shm::Code;
using shm::Deadline;
using shm::Status;

// How long the end of a group may take, beyond what is pending.
constexpr std::chrono::seconds kEnd{5};

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

}  // namespace

ProcessGroupNccl::ProcessGroupNccl(c10::intrusive_ptr<c10d::Store> store, int rank,
                                   int size, c10::intrusive_ptr<OptionsNccl> options)
    : Backend(rank, size),
      store_(std::move(store)),
      options_(std::move(options)),
      watchdog_(std::make_shared<Watchdog>()),
      timeout_(options_->timeout) {}

ProcessGroupNccl::~ProcessGroupNccl() { abort(); }

void ProcessGroupNccl::setTimeout(std::chrono::milliseconds timeout) {
  const std::lock_guard<std::mutex> lock(mu_);
  timeout_ = timeout;
  options_->timeout = timeout;
}

std::chrono::milliseconds ProcessGroupNccl::timeout_or_default(
    std::chrono::milliseconds timeout) const {
  if (timeout > kNoTimeout) return timeout;
  const std::lock_guard<std::mutex> lock(mu_);
  return timeout_;
}

c10d::ErrorType ProcessGroupNccl::getError() {
  std::shared_ptr<Session> session;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    session = session_;
  }
  if (!session) return c10d::ErrorType::SUCCESS;
  Status found = session->failure();
  if (found.ok()) found = session->communicator().async_error();
  switch (found.code()) {
    case Code::kOk:
      return c10d::ErrorType::SUCCESS;
    case Code::kTimedOut:
      return c10d::ErrorType::TIMEOUT;
    case Code::kPeer:
      return c10d::ErrorType::REMOTE_ERROR;
    default:
      return c10d::ErrorType::COMM_ERROR;
  }
}

// --- sessions ---

void ProcessGroupNccl::eagerConnectSingleDevice(at::Device device) { session(device); }

std::shared_ptr<Session> ProcessGroupNccl::session(c10::Device device) {
  const auto existing = [&]() -> std::shared_ptr<Session> {
    const std::lock_guard<std::mutex> lock(mu_);
    raise(ended_);
    if (!session_) return nullptr;
    TORCH_CHECK_VALUE(session_->device() == device,
                      "this process group has its communicator on ", session_->device(),
                      " and cannot take tensors on ", device,
                      ": one group, one communicator, one device");
    return session_;
  };
  if (auto found = existing()) return found;
  const std::lock_guard<std::mutex> one(connecting_);
  if (auto found = existing()) return found;
  auto made = connect(device);
  const std::lock_guard<std::mutex> lock(mu_);
  raise(ended_);
  session_ = made;
  return made;
}

std::shared_ptr<Session> ProcessGroupNccl::connect(c10::Device device) {
  TORCH_CHECK_VALUE(device.is_cuda() && device.has_index(),
                    "weightsync-nccl2 needs a CUDA device with an index; found ",
                    device);
  auto library = library_for(options_->library);
  raise(library.status());
  const nccl::Communicator::Place place{rank_, size_, device.index()};
  auto met = meet(*store_, "weightsync-nccl2/id", library.value(), place,
                  options_->config, shm::after(timeout_or_default(kNoTimeout)));
  raise(met.status());
  const c10::DeviceGuard on(device);
  return std::make_shared<Session>(met.take(), device,
                                   options_->is_high_priority_stream);
}

// --- operations ---

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
  return nullptr;
}

ProcessGroupNccl::WorkPointer ProcessGroupNccl::issue_now(Call call,
                                                          const Launch* launches,
                                                          std::size_t count) {
  const c10::Device device = device_of(call);
  const c10::DeviceGuard on(device);
  const auto session = this->session(device);
  const c10::Stream current = current_stream(device);
  const c10::Stream stream = call.async ? session->stream() : current;
  if (call.async) {
    c10::Event ready = session->take_event();
    ready.record(current);
    ready.block(stream);
    session->give_back(std::move(ready));
  }
  nccl::Communicator& communicator = session->communicator();
  {
    const std::lock_guard<std::timed_mutex> issuing(communicator.issuing());
    session->check();
    if (call.grouped || count > 1) {
      NcclGroup group(communicator.library());
      for (std::size_t each = 0; each < count; ++each) {
        launches[each](communicator, handle_of(stream));
      }
      group.end();
    } else {
      launches[0](communicator, handle_of(stream));
    }
  }
  Issued issued;
  issued.type = call.type;
  issued.name = call.name;
  issued.sequence = call.counts ? ++sequence_ : sequence_.load();
  if (call.async) {
    issued.kept = std::move(call.inputs);
    issued.kept.insert(issued.kept.end(), call.outputs.begin(), call.outputs.end());
  }
  issued.results = std::move(call.outputs);
  issued.timeout = timeout_or_default(call.timeout);
  issued.blocks_host = call.blocks_host || options_->blocking_wait;
  issued.captured = is_captured(current);
  const bool watched = !issued.captured;
  auto work = c10::make_intrusive<WorkNccl>(session, std::move(issued), stream);
  if (watched) watchdog_->add(work);
  return work;
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
  return issue_now(std::move(batch.call), batch.launches.data(), batch.launches.size());
}

// --- the end ---

void ProcessGroupNccl::registerAbortHook(std::int64_t id, c10d::AbortHook hook) {
  watchdog_->register_hook(id, std::move(hook));
}

void ProcessGroupNccl::unregisterAbortHook(std::int64_t id) {
  watchdog_->unregister_hook(id);
}

std::shared_ptr<Session> ProcessGroupNccl::end(const char* why) {
  const std::lock_guard<std::mutex> lock(mu_);
  if (ended_.ok()) ended_ = {Code::kClosed, why};
  return std::exchange(session_, nullptr);
}

void ProcessGroupNccl::abort() {
  const auto session = end("the process group was aborted");
  if (session)
    watchdog_->fail(session, {Code::kClosed, "the process group was aborted"});
  watchdog_->stop();
}

void ProcessGroupNccl::shutdown() {
  const auto session = end("the process group was shut down");
  if (session) {
    const Deadline deadline = shm::after(timeout_or_default(kNoTimeout));
    if (watchdog_->drain(*session, deadline) && session->failure().ok()) {
      session->fail({Code::kClosed, "the process group was shut down"});
      (void)session->communicator().destroy(shm::after(kEnd));
    } else {
      watchdog_->fail(session, {Code::kTimedOut,
                                "the process group was shut down "
                                "while operations were pending"});
    }
  }
  watchdog_->stop();
}

}  // namespace weightsync
