#include "emulator/nccl/rma_proxy.h"

#include <utility>

namespace weightsync::emulator::nccl {

Proxy::~Proxy() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    posted_.notify_all();
  }
  thread_.join();
}

void Proxy::post(Transfer transfer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  transfers_.push_back(std::move(transfer));
  if (!thread_.started()) (void)thread_.start([this] { work(); });
  posted_.notify_all();
}

void Proxy::settle() { const std::lock_guard<std::mutex> lock(reporting_); }

void Proxy::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    posted_.wait(lock, [&] { return stopping_ || !transfers_.empty(); });
    if (stopping_) return;
    const Transfer transfer = std::move(transfers_.front());
    transfers_.pop_front();
    lock.unlock();
    if (transfer.reachable() && transfer.run()) {
      const std::lock_guard<std::mutex> reporting(reporting_);
      transfer.report();
    }
    lock.lock();
  }
}

}  // namespace weightsync::emulator::nccl
