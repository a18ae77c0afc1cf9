#include "backend/nccl/process_group_nccl.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/Logging.h>

#include <utility>

#include "backend/nccl/bootstrap.h"
#include "backend/nccl/raising.h"
#include "backend/nccl/trace.h"

namespace weightsync {
namespace {

using shm::Code;
using shm::Deadline;
using shm::Status;

// How long the end of a group may take, beyond what is pending.
constexpr std::chrono::seconds kEnd{3};

}  // namespace

ProcessGroupNccl::ProcessGroupNccl(c10::intrusive_ptr<c10d::Store> store, int rank,
                                   int size, c10::intrusive_ptr<OptionsNccl> options)
    : Backend(rank, size),
      store_(std::move(store)),
      // A copy of its own: setTimeout() changes it.
      options_(c10::static_intrusive_pointer_cast<OptionsNccl>(options->clone())),
      watchdog_(std::make_shared<Watchdog>()),
      timeouts_(std::make_shared<Timeouts>(options_->timeout)),
      elastic_(options_->enable_reconfigure),
      recording_(*this,
                 {options_->global_ranks_in_group.begin(),
                  options_->global_ranks_in_group.end()},
                 options_->trace_prefix) {}

ProcessGroupNccl::~ProcessGroupNccl() { abort(); }

void ProcessGroupNccl::setGroupUid(const std::string& uid) {
  Backend::setGroupUid(uid);
  recording_.named();
}

void ProcessGroupNccl::setTimeout(std::chrono::milliseconds timeout) {
  TORCH_CHECK_VALUE(timeout > kNoTimeout,
                    "the timeout of a process group must be positive; found ",
                    timeout.count(), " ms");
  timeouts_->set(timeout);
  const std::lock_guard<std::mutex> lock(mu_);
  options_->timeout = timeout;
}

void ProcessGroupNccl::addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
  timeouts_->extend(timeout);
}

std::chrono::milliseconds ProcessGroupNccl::timeout_or_default(
    std::chrono::milliseconds timeout) const {
  return timeouts_->of(timeout);
}

std::shared_ptr<const nccl::Library> ProcessGroupNccl::library() const {
  auto found = library_for(options_->library);
  raise(found.status());
  return found.take();
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

void ProcessGroupNccl::eagerConnectSingleDevice(at::Device device) {
  if (!elastic_) session(device);
}

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
  if (!ended_.ok()) {
    // It ended while this thread met the others: nobody else knows this communicator.
    (void)made->communicator().abort(shm::after(kEnd));
    raise(ended_);
  }
  session_ = made;
  watchdog_->watch(made);
  return made;
}

std::shared_ptr<Session> ProcessGroupNccl::connect(c10::Device device) {
  TORCH_CHECK_VALUE(device.is_cuda() && device.has_index(),
                    "weightsync-nccl2 needs a CUDA device with an index; found ",
                    device);
  if (elastic_) raise(not_formed());
  auto library = library_for(options_->library);
  raise(library.status());
  trace::use_library(library.value()->version_text());
  const nccl::Communicator::Place place{rank_, size_, device.index()};
  auto met = meet(*store_, "weightsync-nccl2/id", library.value(), place,
                  options_->config, shm::after(timeout_or_default(kNoTimeout)), [this] {
                    const std::lock_guard<std::mutex> lock(mu_);
                    return ended_;
                  });
  if (!met.ok()) trace::dump_after(met.status());
  raise(met.status());
  const c10::DeviceGuard on(device);
  return std::make_shared<Session>(met.take(), device,
                                   options_->is_high_priority_stream);
}

// --- the end ---

void ProcessGroupNccl::registerAbortHook(std::int64_t id, c10d::AbortHook hook) {
  watchdog_->register_hook(id, std::move(hook));
}

void ProcessGroupNccl::unregisterAbortHook(std::int64_t id) {
  watchdog_->unregister_hook(id);
}

#if TORCH_VERSION_MINOR >= 15
bool ProcessGroupNccl::isInitialized() {
  const std::lock_guard<std::mutex> lock(mu_);
  return session_ != nullptr;
}

void ProcessGroupNccl::registerCompletionHook(std::int64_t id,
                                              c10d::CompletionHook hook) {
  watchdog_->register_completion_hook(id, std::move(hook));
}

void ProcessGroupNccl::unregisterCompletionHook(std::int64_t id) {
  watchdog_->unregister_completion_hook(id);
}
#endif

std::shared_ptr<Session> ProcessGroupNccl::end(const char* why) {
  c10::intrusive_ptr<c10d::Store> server;  // has a thread: it goes without the lock
  const std::lock_guard<std::mutex> lock(mu_);
  if (ended_.ok()) ended_ = {Code::kClosed, why};
  server = std::move(server_);
  if (session_) last_ = session_->share_communicator();
  return std::exchange(session_, nullptr);
}

bool ProcessGroupNccl::quarantined() const {
  const std::lock_guard<std::mutex> lock(mu_);
  return last_ && last_->quarantined() && !last_->gone();
}

void ProcessGroupNccl::abort() {
  constexpr const char* kWhy = "the process group was aborted";
  if (const auto session = end(kWhy)) {
    watchdog_->fail(session, {Code::kClosed, kWhy});
    // If it failed before, and without an abort.
    (void)session->communicator().abort(shm::after(kEnd));
  }
  watchdog_->stop();
}

void ProcessGroupNccl::shutdown() {
  constexpr const char* kWhy = "the process group was shut down";
  if (const auto session = end(kWhy)) {
    // Each operation has a time of its own, after which the watchdog ends the session.
    const bool drained = watchdog_->drain(*session, Deadline::max());
    if (drained && session->fail({Code::kClosed, kWhy}) && !shrunk_) {
      Status ended = session->communicator().destroy(shm::after(kEnd));
      if (!ended.ok()) LOG(ERROR) << "weightsync-nccl2: " << ended.message();
    }
    // If it has not ended yet.
    (void)session->communicator().abort(shm::after(kEnd));
  }
  watchdog_->stop();
}

}  // namespace weightsync
