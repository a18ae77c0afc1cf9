// Tables of runs: which bytes of tensors belong to which bytes of a window.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "backend/status_error.h"

namespace weightsync {

// Columns of a table of runs, one row a run, int64, bytes except for the index: which
// tensor, offset in the tensor, offset in the window, rows, bytes of a row, stride in
// the tensor, stride in the window.
inline constexpr std::int64_t kRunColumns = 7;

inline void check_table(const at::Tensor& table) {
  check(table.dim() == 2 && table.size(1) == kRunColumns && table.is_contiguous() &&
            table.scalar_type() == at::kLong && table.device().is_cpu(),
        shm::Code::kInvalid,
        "runs must be a contiguous int64 CPU tensor of shape (n, 7)");
}

// Whether the bytes that a run touches, from its first to its last, are inside.
inline bool fits(std::int64_t offset, std::int64_t rows, std::int64_t row_bytes,
                 std::int64_t stride, std::uint64_t nbytes) {
  if (offset < 0 || rows < 0 || row_bytes < 0 || stride < 0) return false;
  if (rows == 0 || row_bytes == 0) return true;
  std::int64_t extent = 0;
  std::int64_t end = 0;
  if (__builtin_mul_overflow(rows - 1, stride, &extent)) return false;
  if (__builtin_add_overflow(extent, row_bytes, &extent)) return false;
  if (__builtin_add_overflow(extent, offset, &end)) return false;
  return static_cast<std::uint64_t>(end) <= nbytes;
}

}  // namespace weightsync
