// Copies and memsets: whether CUDA allows them, and how they are carried out.
//
// Pageable host memory is read before the call returns, and written before it returns,
// as CUDA does; everything else is read and written when the stream comes to it.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>

#include "cuda/abi.h"
#include "machine.h"
#include "outcome.h"

namespace weightsync::emulator {

// `height` rows of `width` bytes; a plain copy has one row.
struct Copy {
  std::byte* to = nullptr;
  std::size_t to_pitch = 0;
  const std::byte* from = nullptr;
  std::size_t from_pitch = 0;
  std::size_t width = 0;
  std::size_t height = 1;
  cudaMemcpyKind kind = cudaMemcpyDefault;

  std::size_t to_span() const { return to_pitch * (height - 1) + width; }
  std::size_t from_span() const { return from_pitch * (height - 1) + width; }
};

struct Fill {
  std::byte* to = nullptr;
  std::size_t pitch = 0;
  int value = 0;
  std::size_t width = 0;
  std::size_t height = 1;
};

// A plain copy.
inline Copy copy_of(void* to, const void* from, std::size_t nbytes,
                    cudaMemcpyKind kind) {
  return {static_cast<std::byte*>(to),
          nbytes,
          static_cast<const std::byte*>(from),
          nbytes,
          nbytes,
          1,
          kind};
}

// Whether the host waits for a copy or fill, beyond what pageable memory asks for.
enum class Wait : std::uint8_t { kNo, kUnlessOnDevice };

Outcome copy_on(Machine& machine, const std::shared_ptr<QueuedStream>& stream,
                const char* what, const Copy& copy, Wait wait);
Outcome fill_on(Machine& machine, const std::shared_ptr<QueuedStream>& stream,
                const char* what, const Fill& fill);

}  // namespace weightsync::emulator
