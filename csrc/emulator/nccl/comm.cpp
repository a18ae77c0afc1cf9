#include "emulator/nccl/comm.h"

#include <cstdio>
#include <numeric>
#include <utility>

#include "emulator/nccl/diagnosis.h"
#include "emulator/nccl/handles.h"
#include "emulator/nccl/registry.h"

namespace weightsync::emulator::nccl {

std::shared_ptr<Communicator> Communicator::find(ncclComm_t handle) {
  return handle == nullptr ? nullptr : Registry::here().find(handle);
}

std::vector<std::shared_ptr<Communicator>> Communicator::all() {
  return Registry::here().all();
}

std::shared_ptr<Communicator> Communicator::create(int rank, int size, int device,
                                                   Config config) {
  const std::shared_ptr<Communicator> made(
      new Communicator(rank, size, device, std::move(config)));
  Registry::here().add(made->handle(), made);
  return made;
}

Communicator::Communicator(int rank, int size, int device, Config config)
    : handle_(new_handle<ncclComm_t>()),
      rank_(rank),
      size_(size),
      device_(device),
      config_(std::move(config)) {}

Communicator::~Communicator() = default;

void Communicator::connect(Membership members,
                           std::vector<std::shared_ptr<shm::Segment>> controls,
                           std::shared_ptr<Serial> serial) {
  members_ = std::move(members);
  segments_ = std::move(controls);
  for (const auto& segment : segments_) {
    controls_.push_back(reinterpret_cast<Control*>(segment->data()));
  }
  serial_ = std::move(serial);
  ++serial_->communicators();
  connected_.store(true, std::memory_order_release);
}

Outcome Communicator::ready() const {
  if (aborted()) return {};
  const ncclResult_t result = async_result_.load(std::memory_order_acquire);
  if (result == ncclSuccess) return {};
  if (result == ncclInProgress) {
    return invalid_argument(describe() +
                            " is still in progress: poll ncclCommGetAsyncError before "
                            "the next call");
  }
  const shm::MutexLock lock(mu_);
  return {result, describe() + " failed before: " + failure_.message()};
}

Outcome Communicator::usable() const {
  if (revoked()) return invalid_usage(describe() + " was revoked");
  if (suspended()) return invalid_usage(describe() + " is suspended");
  return ready();
}

std::string Communicator::describe() const {
  char identity[24];
  std::snprintf(
      identity, sizeof identity, "%04llx",
      static_cast<unsigned long long>(connected() ? members_.identity & 0xffff : 0));
  return "rank " + std::to_string(rank_) + " of " + std::to_string(size_) +
         " (communicator " + identity + ", device " + std::to_string(device_) + ")";
}

std::vector<int> Communicator::all_ranks() const {
  std::vector<int> ranks(static_cast<std::size_t>(size_));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

void Communicator::fail(const Outcome& outcome) {
  if (outcome.ok()) return;
  const shm::MutexLock lock(mu_);
  if (!failure_.ok()) return;
  failure_ = outcome;
  // A call in progress reports it at its end.
  ncclResult_t none = ncclSuccess;
  async_result_.compare_exchange_strong(none, outcome.code());
}

void Communicator::begin_work(std::shared_ptr<Background> job) {
  const shm::MutexLock lock(mu_);
  job_ = std::move(job);
  failure_ = {};  // only a revoke begins after a failure, and it mends
  async_result_.store(ncclInProgress, std::memory_order_release);
}

void Communicator::end_work(const Outcome& outcome) {
  const shm::MutexLock lock(mu_);
  if (failure_.ok()) failure_ = outcome;
  async_result_.store(failure_.code(), std::memory_order_release);
}

bool Communicator::has_job() const {
  const shm::MutexLock lock(mu_);
  return job_ != nullptr;
}

void Communicator::join_work() {
  std::shared_ptr<Background> job;
  {
    const shm::MutexLock lock(mu_);
    job = job_;
  }
  if (job) job->join();
}

void Communicator::join_finished_work() {
  if (async_result() != ncclInProgress) join_work();
}

void Communicator::raise_abort() {
  abort_flag_.store(true, std::memory_order_seq_cst);
  if (connected()) control().doorbell.ring();
}

void Communicator::synchronize() {
  const diagnosis::Guard guard(*this, "for its operations to end");
  serial_->drain();
}

void Communicator::retire() {
  const std::shared_ptr<Communicator> last = Registry::here().remove(handle());
  if (last && connected()) {
    --serial_->communicators();
    control().gone.store(1, std::memory_order_release);
    for (int rank = 0; rank < size_; ++rank) ring(rank);
  }
  std::map<std::type_index, std::shared_ptr<void>> parts;
  const shm::MutexLock lock(mu_);
  parts.swap(parts_);
}

}  // namespace weightsync::emulator::nccl
