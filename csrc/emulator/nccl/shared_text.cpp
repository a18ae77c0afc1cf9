#include "emulator/nccl/shared_text.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace weightsync::emulator::nccl {
namespace {

constexpr int kAttempts = 100;

}  // namespace

void SharedText::set(std::string_view text) {
  std::array<std::uint64_t, kWords> words{};
  std::memcpy(words.data(), text.data(), std::min(text.size(), kBytes));
  const std::uint64_t version = version_.load();
  version_.store(version + 1);
  for (std::size_t i = 0; i < kWords; ++i) words_[i].store(words[i]);
  version_.store(version + 2);
}

std::string SharedText::get() const {
  std::array<std::uint64_t, kWords> words{};
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const std::uint64_t before = version_.load();
    for (std::size_t i = 0; i < kWords; ++i) words[i] = words_[i].load();
    if (before % 2 == 0 && before == version_.load()) {
      const auto* const bytes = reinterpret_cast<const char*>(words.data());
      return {bytes, ::strnlen(bytes, kBytes)};
    }
  }
  return {};
}

}  // namespace weightsync::emulator::nccl
