#include "emulator/nccl/serial.h"

#include <utility>

namespace weightsync::emulator::nccl {

std::uint64_t Serial::take(Pending pending) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t place = taken_++;
  pending.place = place;
  pending_.emplace(place, std::move(pending));
  return place;
}

void Serial::await_turn(std::uint64_t place) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return pending_.begin()->first == place; });
  pending_.begin()->second.running = true;
}

void Serial::end(std::uint64_t place) {
  const std::lock_guard lock(mutex_);
  pending_.erase(place);
  changed_.notify_all();
}

void Serial::drain() {
  std::unique_lock lock(mutex_);
  const std::uint64_t taken = taken_;
  changed_.wait(lock,
                [&] { return pending_.empty() || pending_.begin()->first >= taken; });
}

void Serial::note(std::uint64_t place, std::string missing) {
  const std::lock_guard lock(mutex_);
  const auto found = pending_.find(place);
  if (found != pending_.end()) found->second.missing = std::move(missing);
}

std::vector<Serial::Pending> Serial::pending() const {
  const std::lock_guard lock(mutex_);
  std::vector<Pending> all;
  all.reserve(pending_.size());
  for (const auto& [place, pending] : pending_) all.push_back(pending);
  return all;
}

}  // namespace weightsync::emulator::nccl
