#include "backend/nccl/session.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "backend/nccl/raising.h"

namespace weightsync {
namespace {

constexpr std::size_t kMostEvents = 1024;

const c10::impl::VirtualGuardImpl& guard() {
  static const c10::impl::VirtualGuardImpl found(c10::DeviceType::CUDA);
  return found;
}

}  // namespace

c10::Device current_device() { return guard().getDevice(); }

c10::Stream current_stream(c10::Device device) { return guard().getStream(device); }

cudaStream_t handle_of(const c10::Stream& stream) {
  return static_cast<cudaStream_t>(stream.native_handle());
}

bool is_captured(const c10::Stream& stream) {
  return guard().isStreamCapturing(stream);
}

Session::Session(nccl::Communicator::Pointer communicator, c10::Device device,
                 bool high_priority, std::shared_ptr<OwnStream> stream)
    : communicator_(std::move(communicator)),
      windows_(std::make_shared<nccl::Windows>(communicator_)),
      device_(device),
      stream_(stream ? std::move(stream) : OwnStream::make(device, high_priority)),
      listener_(OwnStream::make(device, false)) {}

Session::~Session() {
  if (communicator_->gone()) return;
  stream_->leave();
  listener_->leave();
}

void Session::check() const {
  if (failed()) raise(failure());
}

shm::Status Session::failure() const {
  const std::lock_guard<std::mutex> lock(mu_);
  return failure_;
}

bool Session::fail(shm::Status why) {
  const std::lock_guard<std::mutex> lock(mu_);
  if (!failure_.ok()) return false;
  failure_ = std::move(why);
  failed_.store(true, std::memory_order_release);
  return true;
}

c10::Event Session::take_event() {
  const std::lock_guard<std::mutex> lock(mu_);
  if (events_.empty()) return c10::Event(c10::DeviceType::CUDA);
  c10::Event event = std::move(events_.back());
  events_.pop_back();
  return event;
}

void Session::give_back(c10::Event event) {
  const std::lock_guard<std::mutex> lock(mu_);
  if (events_.size() < kMostEvents) events_.push_back(std::move(event));
}

}  // namespace weightsync
