#include "backend/nccl/work_nccl.h"

#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <thread>

#include "backend/nccl/raising.h"
#include "backend/nccl/recording.h"

namespace weightsync {
namespace {

using shm::Code;
using shm::Deadline;
using State = Operation::State;

std::string in_seconds(std::chrono::milliseconds time) {
  char text[32];
  std::snprintf(text, sizeof text, "%g s", static_cast<double>(time.count()) / 1000);
  return text;
}

}  // namespace

WorkNccl::WorkNccl(std::shared_ptr<Session> session, Issued issued,
                   const c10::Stream& stream)
    : Work(session->rank(), issued.type),
      blocks_host_(issued.blocks_host),
      results_(std::move(issued.results)),
      operation_(
          std::make_shared<Operation>(std::move(session), std::move(issued), stream)) {}

WorkNccl::~WorkNccl() {
  if (bell_) bell_->close();
}

bool WorkNccl::isSuccess() const { return operation_->look() == State::kDone; }

std::exception_ptr WorkNccl::exception() const {
  try {
    raise(operation_->failure());
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

bool WorkNccl::wait(std::chrono::milliseconds timeout) {
  if (operation_->captured()) {
    // The host cannot wait for what is yet to run.
  } else if (timeout > kNoTimeout) {
    wait_on_host(shm::after(timeout), timeout);
  } else if (blocks_host_) {
    wait_on_host(operation_->deadline(), operation_->getTimeout());
  }
  Session& session = operation_->session();
  // Only a failure matters here: a stream that waits for what is over loses nothing.
  if (session.failed()) (void)operation_->look();
  if (operation_->state() == State::kFailed) raise(operation_->failure());
  operation_->block(current_stream(session.device()));
  return true;
}

void WorkNccl::wait_on_host(Deadline deadline, std::chrono::milliseconds timeout) {
  constexpr std::chrono::microseconds kLongest{1000};
  std::chrono::microseconds pause{10};
  for (;;) {
    const State state = operation_->look();
    if (state == State::kDone) return;
    if (state == State::kFailed) raise(operation_->failure());
    if (shm::Clock::now() >= deadline) {
      const shm::Status why{Code::kTimedOut,
                            operation_->describe() + " timed out: it was waited for " +
                                in_seconds(timeout) + " and is not finished"};
      operation_->give_up(why);
      raise(why);
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongest);
  }
}

void WorkNccl::abort() {
  TORCH_CHECK(false,
              "an operation of NCCL cannot be given up alone: abort its process group");
}

int WorkNccl::fileno() {
  const std::lock_guard<std::mutex> lock(mu_);
  if (bell_) return bell_->fileno();
  auto bell = std::make_shared<Bell>();
  operation_->ring(bell);
  bell_ = std::move(bell);
  return bell_->fileno();
}

c10::intrusive_ptr<c10::ivalue::Future> WorkNccl::getFuture() {
  const std::lock_guard<std::mutex> lock(mu_);
  if (future_) return future_;
  future_ = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()),
      std::vector<c10::Device>{operation_->session().device()});
  if (operation_->look() == State::kFailed) {
    future_->setError(exception());
    return future_;
  }
  // It is complete at once for the host: whoever waits for it makes their stream wait
  // for this one. It takes the device from the storages, and a send has no result.
  const c10::StreamGuard on(operation_->stream());
  const at::Tensor none = at::empty(
      {0}, at::TensorOptions().dtype(at::kByte).device(operation_->session().device()));
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages{
      none.storage().getWeakStorageImpl()};
  for (const at::Tensor& each : results_) {
    storages.push_back(each.storage().getWeakStorageImpl());
  }
  future_->markCompleted(c10::IValue(results_), std::move(storages));
  return future_;
}

}  // namespace weightsync
