#include "emulator/nccl/window_table.h"

#include <algorithm>
#include <utility>

namespace weightsync::emulator::nccl {
namespace {

using Shared = std::shared_ptr<const Window>;

bool starts_after(const std::byte* address, const Shared& window) {
  return std::less<>{}(address, window->base);
}

// One past the last window that starts at or before the address.
auto upper(const std::vector<Shared>& windows, const std::byte* address) {
  return std::upper_bound(windows.begin(), windows.end(), address, starts_after);
}

}  // namespace

Shared WindowTable::add(ncclWindow_t handle, Window window) {
  auto added = std::make_shared<const Window>(std::move(window));
  by_address_.insert(upper(by_address_, added->base), added);
  by_handle_[handle] = added;
  stride_used_ += added->stride_use;
  return added;
}

Shared WindowTable::find(ncclWindow_t handle) const {
  const auto found = by_handle_.find(handle);
  return found == by_handle_.end() ? nullptr : found->second;
}

Shared WindowTable::find_address(const void* address) const {
  const auto* const byte = static_cast<const std::byte*>(address);
  const auto after = upper(by_address_, byte);
  if (after == by_address_.begin()) return nullptr;
  const Shared& nearest = *std::prev(after);
  const auto distance = static_cast<std::size_t>(byte - nearest->base);
  return distance < nearest->nbytes ? nearest : nullptr;
}

bool WindowTable::remove(ncclWindow_t handle) {
  const auto found = by_handle_.find(handle);
  if (found == by_handle_.end()) return false;
  by_address_.erase(std::prev(upper(by_address_, found->second->base)));
  stride_used_ -= found->second->stride_use;
  by_handle_.erase(found);
  return true;
}

Shared WindowTable::overlapping(const void* base, std::size_t nbytes) const {
  const auto* const first = static_cast<const std::byte*>(base);
  for (const auto& [handle, window] : by_handle_) {
    const bool apart = std::less_equal<>{}(first + nbytes, window->base) ||
                       std::less_equal<>{}(window->base + window->nbytes, first);
    if (!apart) return window;
  }
  return nullptr;
}

}  // namespace weightsync::emulator::nccl
