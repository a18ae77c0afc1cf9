#include "nccl/windows.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "cuda/runtime.h"
#include "nccl/aside.h"
#include "nccl/lock_for.h"

namespace weightsync::nccl {
namespace {

// How long memory that is freed waits for a thread that issues operations.
constexpr std::chrono::seconds kIssuer{5};

bool is_off(const char* variable) {
  const char* const value = std::getenv(variable);
  return value != nullptr && std::strcmp(value, "0") == 0;
}

// NCCL says success and makes no window, and does not say why.
Status no_window(const Library& library) {
  std::string why =
      "its GPUs cannot map each other's memory (every pair of a host needs "
      "peer-to-peer access, and hosts a network that NCCL can put through)";
  for (const char* const variable : {"NCCL_WIN_ENABLE", "NCCL_CUMEM_ENABLE"}) {
    if (is_off(variable)) why = std::string(variable) + " is 0";
  }
  return {Code::kUnsupported, "NCCL " + library.version_text() +
                                  " makes no windows for this process group: " + why};
}

Status ended() { return {Code::kClosed, "the communicator has ended"}; }

}  // namespace

Windows::Windows(Communicator::Pointer communicator)
    : communicator_(std::move(communicator)) {}

Windows::~Windows() {
  if (!communicator_->gone()) return;
  const Library& library = communicator_->library();
  if (exchanged_ != nullptr) (void)library.ncclMemFree(exchanged_);
  for (void* const each : filled_) (void)library.ncclMemFree(each);
}

Status Windows::aside(const std::string& what, Deadline deadline,
                      std::function<Status()> work, const Interrupted& interrupted) {
  const std::string text = what + " (rank " + std::to_string(communicator_->rank()) +
                           " of " + std::to_string(communicator_->size()) + ")";
  return run_aside(
      text, deadline,
      [self = shared_from_this(), work = std::move(work)]() -> Status {
        Status bound = cuda::bind_device(self->communicator_->device());
        if (!bound.ok()) return bound;
        return work();
      },
      // An abort may not get a call out of NCCL.
      [this, &interrupted]() -> Status {
        if (communicator_->ended()) return ended();
        return interrupted ? interrupted() : Status();
      });
}

// --- what all ranks do ---

Result<std::vector<Windows::Words>> Windows::exchange(const Words& mine,
                                                      cudaStream_t stream,
                                                      Deadline deadline) {
  const auto all = std::make_shared<std::vector<Words>>();
  Status status =
      aside("meeting all ranks", deadline, [this, mine, stream, all]() -> Status {
        return exchange_now(mine, stream, *all);
      });
  if (!status.ok()) return status;
  return std::move(*all);
}

Status Windows::exchange_now(const Words& mine, cudaStream_t stream,
                             std::vector<Words>& all) {
  const Library& library = communicator_->library();
  const cuda::Runtime& runtime = cuda::runtime();
  const auto size = static_cast<std::size_t>(communicator_->size());
  const std::size_t bytes = size * sizeof(Words);
  if (exchanged_ == nullptr) {
    void* made = nullptr;
    Status status = library.check(library.ncclMemAlloc(&made, bytes + sizeof(Words)),
                                  "ncclMemAlloc");
    if (!status.ok()) return status;
    exchanged_ = static_cast<std::byte*>(made);
  }
  all.resize(size);
  Status issued = issue_exchange(mine, stream, all);
  // Also when a call failed: what was issued before it uses this memory.
  Status over =
      runtime.check(runtime.stream_synchronize(stream), "cudaStreamSynchronize");
  return issued.ok() ? over : issued;
}

Status Windows::issue_exchange(const Words& mine, cudaStream_t stream,
                               std::vector<Words>& all) {
  const Library& library = communicator_->library();
  const cuda::Runtime& runtime = cuda::runtime();
  const std::size_t bytes = all.size() * sizeof(Words);
  std::byte* const sent = exchanged_ + bytes;
  Status status = runtime.check(runtime.memcpy_async(sent, mine.data(), sizeof mine,
                                                     cudaMemcpyHostToDevice, stream),
                                "cudaMemcpyAsync");
  if (!status.ok()) return status;
  {
    const std::lock_guard<std::timed_mutex> issuing(communicator_->issuing());
    if (communicator_->ended()) return ended();
    status =
        library.check(library.ncclAllGather(sent, exchanged_, sizeof mine, ncclUint8,
                                            communicator_->handle(), stream),
                      "ncclAllGather");
  }
  if (!status.ok()) return status;
  return runtime.check(runtime.memcpy_async(all.data(), exchanged_, bytes,
                                            cudaMemcpyDeviceToHost, stream),
                       "cudaMemcpyAsync");
}

Status Windows::add(void* base, std::size_t bytes, Deadline deadline,
                    const Interrupted& interrupted) {
  struct Call {
    Round made;
    std::atomic<bool> over{false};
  };
  const auto call = std::make_shared<Call>();
  const auto work = [this, base, bytes, call]() -> Status {
    Status status = register_now(base, bytes, call->made);
    call->over = true;
    return status;
  };
  Status status = aside("ncclCommWindowRegister", deadline, work, interrupted);
  const std::lock_guard<std::mutex> lock(mu_);
  // NCCL may still be about to use memory of which this knows the base and no handle.
  const Round failed = call->over ? Round{} : Round{nullptr, base, bytes};
  rounds_.push_back(status.ok() ? call->made : failed);
  return status;
}

Status Windows::register_now(void* base, std::size_t bytes, Round& made) {
  const Library& library = communicator_->library();
  const std::lock_guard<std::timed_mutex> issuing(communicator_->issuing());
  if (communicator_->ended()) return ended();
  ncclWindow_t handle = nullptr;
  Status status =
      library.check(library.ncclCommWindowRegister(communicator_->handle(), base, bytes,
                                                   &handle, kNcclWindowCollSymmetric),
                    "ncclCommWindowRegister");
  if (!status.ok()) return status;
  if (handle == nullptr) return no_window(library);
  made = {handle, base, bytes};
  return {};
}

Status Windows::warm_up(cudaStream_t stream, Deadline deadline) {
  if (warm_) return {};
  Status status = aside("the first one-sided call", deadline,
                        [this, stream]() -> Status { return warm_up_now(stream); });
  warm_ = status.ok();
  return status;
}

// A signal to itself and the wait for it: both sides of it are set up then.
Status Windows::warm_up_now(cudaStream_t stream) {
  const Library& library = communicator_->library();
  {
    const std::lock_guard<std::timed_mutex> issuing(communicator_->issuing());
    if (communicator_->ended()) return ended();
    const int rank = communicator_->rank();
    Status status = library.check(
        library.ncclSignal(rank, 0, 0, 0, communicator_->handle(), stream),
        "ncclSignal");
    if (!status.ok()) return status;
    ncclWaitSignalDesc_t one{1, rank, 0, 0};
    status =
        library.check(library.ncclWaitSignal(1, &one, communicator_->handle(), stream),
                      "ncclWaitSignal");
    if (!status.ok()) return status;
  }
  const cuda::Runtime& runtime = cuda::runtime();
  return runtime.check(runtime.stream_synchronize(stream), "cudaStreamSynchronize");
}

// --- what this rank knows ---

Result<void*> Windows::fill_in(std::size_t bytes) {
  void* made = nullptr;
  const Library& library = communicator_->library();
  Status bound = cuda::bind_device(communicator_->device());
  if (!bound.ok()) return bound;
  Status status = library.check(library.ncclMemAlloc(&made, bytes), "ncclMemAlloc");
  if (!status.ok()) return status;
  filled_.push_back(made);
  return made;
}

std::int64_t Windows::round_of(const void* base) const {
  const std::lock_guard<std::mutex> lock(mu_);
  for (std::size_t i = 0; i < rounds_.size(); ++i) {
    if (rounds_[i].handle != nullptr && rounds_[i].base == base) {
      return static_cast<std::int64_t>(i);
    }
  }
  return -1;
}

Windows::Round Windows::round(std::int64_t number) const {
  const std::lock_guard<std::mutex> lock(mu_);
  const auto index = static_cast<std::size_t>(number);
  return number >= 0 && index < rounds_.size() ? rounds_[index] : Round{};
}

std::int64_t Windows::rounds() const {
  const std::lock_guard<std::mutex> lock(mu_);
  return static_cast<std::int64_t>(rounds_.size());
}

bool Windows::forget(const void* base) {
  const std::int64_t number = round_of(base);
  if (number < 0) {
    const std::lock_guard<std::mutex> lock(mu_);
    const bool stuck =
        std::any_of(rounds_.begin(), rounds_.end(),
                    [base](const Round& each) { return each.base == base; });
    return !stuck || communicator_->gone();
  }
  ncclWindow_t handle = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    std::swap(handle, rounds_[static_cast<std::size_t>(number)].handle);
    rounds_[static_cast<std::size_t>(number)].base = nullptr;
  }
  const auto issuing = lock_for(communicator_->issuing(), kIssuer);
  if (communicator_->ended()) return communicator_->gone();
  if (!issuing.owns_lock()) return false;
  const Library& library = communicator_->library();
  return library.ncclCommWindowDeregister(communicator_->handle(), handle) ==
         ncclSuccess;
}

}  // namespace weightsync::nccl
