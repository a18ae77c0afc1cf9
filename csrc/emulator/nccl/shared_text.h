// SharedText: a short text in shared memory with one writer, read while it changes.
//
// A sequence lock whose words are atomic: a reader sees a whole text, or none if the
// writer was too busy (or died) meanwhile. All zeroes is the empty text.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace weightsync::emulator::nccl {

class SharedText {
 public:
  static constexpr std::size_t kBytes = 512;  // longer texts are cut

  // One writer at a time.
  void set(std::string_view text);
  std::string get() const;

 private:
  static constexpr std::size_t kWords = kBytes / sizeof(std::uint64_t);

  std::atomic<std::uint64_t> version_;  // odd while it is written
  std::atomic<std::uint64_t> words_[kWords];
};

}  // namespace weightsync::emulator::nccl
