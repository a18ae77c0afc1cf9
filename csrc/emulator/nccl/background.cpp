#include "emulator/nccl/background.h"

#include <thread>
#include <utility>

namespace weightsync::emulator::nccl {

void Background::start(std::function<void()> run) {
  auto body = [self = shared_from_this(), run = std::move(run)] {
    self->runner_.store(std::this_thread::get_id());
    run();
    self->finished_.store(true, std::memory_order_release);
    self->done_.ring();
  };
  const std::lock_guard lock(mutex_);
  if (!thread_.start(body).ok()) body();
}

void Background::join() {
  if (runner_.load() == std::this_thread::get_id()) return;
  {
    const shm::Doorbell::Waiting waiting(done_);
    while (!finished()) {
      const std::uint32_t seen = done_.count();
      if (!finished()) done_.wait(seen, shm::Deadline::max());
    }
  }
  const std::lock_guard lock(mutex_);
  thread_.join();
}

}  // namespace weightsync::emulator::nccl
