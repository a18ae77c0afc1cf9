#include "emulator/nccl/registrations.h"

namespace weightsync::emulator::nccl {
namespace {

// Opaque to the user, and never dereferenced.
void* to_handle(std::uintptr_t number) {
  return reinterpret_cast<void*>(number);  // NOLINT: an address it is
}

}  // namespace

void* Registrations::add(const void* buffer, std::size_t nbytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(buffer);
  const std::uintptr_t end = begin + nbytes;
  for (auto& [handle, registered] : live_) {
    if (registered.begin <= begin && end <= registered.end) {
      ++registered.count;
      return to_handle(handle);
    }
  }
  live_[++last_] = {begin, end, 1};
  return to_handle(last_);
}

bool Registrations::remove(void* handle) {
  const auto found = live_.find(reinterpret_cast<std::uintptr_t>(handle));
  if (found == live_.end()) return false;
  if (--found->second.count == 0) live_.erase(found);
  return true;
}

}  // namespace weightsync::emulator::nccl
