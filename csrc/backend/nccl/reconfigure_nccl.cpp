// Groups that are formed of other members: reconfigure.
//
// What was there stays until all members have agreed. Then what is pending is given up,
// the communicator is aborted (a destruction would wait for ranks that may be dead),
// and, once all have done so, the next one is made. An attempt that fails after that
// leaves the group unformed, and it can be reconfigured again.
#include <c10/core/DeviceGuard.h>

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <algorithm>
#include <memory>
#include <unordered_set>
#include <utility>

#include "backend/nccl/bootstrap.h"
#include "backend/nccl/process_group_nccl.h"
#include "backend/nccl/raising.h"
#include "backend/nccl/rendezvous.h"
#include "backend/nccl/trace.h"

namespace weightsync {
namespace {

using shm::Code;
using shm::Deadline;
using shm::Status;

// For the end of the last communicator, and at least for the making of the next one:
// once all have agreed nobody may be late alone.
constexpr std::chrono::seconds kEnd{5};

// A list gives ranks by position; of a set all members make the same order.
std::vector<std::string> ordered(const c10d::ReconfigureOptions& opts) {
  if (const auto* list = std::get_if<std::vector<std::string>>(&opts.handles)) {
    return *list;
  }
  const auto& set = std::get<0>(opts.handles);
  std::vector<std::string> handles(set.begin(), set.end());
  std::sort(handles.begin(), handles.end());
  return handles;
}

// The rank of the handle that is ours.
int rank_of(const std::string& mine, const std::vector<std::string>& handles) {
  TORCH_CHECK_VALUE(!handles.empty(), "reconfigure: expected handles, found none");
  std::unordered_set<std::string> seen;
  for (const std::string& handle : handles) {
    const auto parsed = Handle::parse(handle);
    TORCH_CHECK_VALUE(parsed.ok(), "reconfigure: ", parsed.status().message());
    TORCH_CHECK_VALUE(seen.insert(handle).second, "reconfigure: the handle ", handle,
                      " comes twice");
  }
  const auto found = std::find(handles.begin(), handles.end(), mine);
  TORCH_CHECK_VALUE(found != handles.end(), "reconfigure: the handle of this process, ",
                    mine, ", is not among the handles");
  return static_cast<int>(found - handles.begin());
}

c10::intrusive_ptr<c10d::Work> done() {
  auto future = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()));
  future->markCompleted(c10::IValue(std::vector<at::Tensor>()));
  return c10d::Work::create_from_future(future);
}

}  // namespace

Status ProcessGroupNccl::not_formed() {
  return {Code::kClosed, "the process group is not formed: reconfigure() it first"};
}

c10d::ReconfigureHandle ProcessGroupNccl::get_reconfigure_handle() const {
  const std::lock_guard<std::mutex> lock(mu_);
  raise(ended_);
  auto address = address_of(store_, server_);
  raise(address.status());
  return Handle{rank_, uuid_, instance_, address.take()}.text();
}

c10::Device ProcessGroupNccl::device_to_form_on() const {
  {
    const std::lock_guard<std::mutex> lock(mu_);
    if (session_) return session_->device();
  }
  if (const auto bound = getBoundDeviceId()) return *bound;
  return current_device();
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNccl::reconfigure(
    const c10d::ReconfigureOptions& opts) {
  const std::lock_guard<std::mutex> one(connecting_);
  const auto timeout = timeout_or_default(opts.timeout.value_or(kNoTimeout));
  const Deadline deadline = shm::after(timeout);
  std::vector<std::string> handles = ordered(opts);
  const int rank = rank_of(get_reconfigure_handle(), handles);
  const int size = static_cast<int>(handles.size());
  auto library = library_for(options_->library);
  raise(library.status());

  Recording::Open recorded({recording_.begin_membership("reconfigure", timeout)});
  const auto interrupted = [this] {
    const std::lock_guard<std::mutex> lock(mu_);
    return ended_;
  };
  const auto rendezvous = std::make_shared<Rendezvous>(
      Rendezvous::Plan{opts.uuid, std::move(handles), rank}, deadline, interrupted);
  if (!used_.insert(opts.uuid).second) {
    const std::string why =
        "reconfigure: uuid " + std::to_string(opts.uuid) + " was used before";
    rendezvous->refuse(why);
    raise({Code::kInvalid, why});
  }
  const Status agreed = rendezvous->agree();
  if (!agreed.ok()) trace::dump_after(agreed);
  raise(agreed);

  const c10::Device device = device_to_form_on();
  end_session();
  auto id = rendezvous->exchange(library.value(), std::max(deadline, shm::after(kEnd)));
  if (!id.ok()) trace::dump_after(id.status());
  raise(id.status());
  const nccl::Communicator::Place place{rank, size, device.index()};
  auto made =
      nccl::Communicator::create(library.value(), id.value(), place, options_->config,
                                 std::max(deadline, shm::after(kEnd)), interrupted);
  if (!made.ok()) trace::dump_after(made.status());
  raise(made.status());
  adopt(made.take(), device, opts.uuid);
  Recording::finish(recorded.keep(), true);
  recording_.members_changed(std::to_string(opts.uuid));
  if (rank == 0) rendezvous->forget();
  return done();
}

void ProcessGroupNccl::end_session() {
  std::shared_ptr<Session> session;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    elastic_ = true;
    session = std::exchange(session_, nullptr);
  }
  if (!session) return;
  watchdog_->give_up(session, {Code::kClosed, "the process group was reconfigured"});
  (void)session->communicator().abort(shm::after(kEnd));
  // What an abort could not end may still be on it.
  stream_ = session->communicator().gone() ? session->share_stream() : nullptr;
}

void ProcessGroupNccl::adopt(nccl::Communicator::Pointer communicator,
                             c10::Device device, std::int64_t uuid) {
  const c10::DeviceGuard on(device);
  const bool fits = stream_ && stream_->stream().device() == device;
  auto session = std::make_shared<Session>(std::move(communicator), device,
                                           options_->is_high_priority_stream,
                                           fits ? stream_ : nullptr);
  Status ended;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    ended = ended_;
    if (ended.ok()) {
      rank_ = session->rank();
      size_ = session->size();
      uuid_ = uuid;
      sequence_ = 0;
      session_ = session;
      watchdog_->watch(session);
      return;
    }
  }
  session->fail(ended);
  (void)session->communicator().abort(shm::after(kEnd));
  raise(ended);
}

}  // namespace weightsync
