// Tables of runs: which bytes of tensors belong to which bytes of a window.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>

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

// That a row of a table stays inside of its tensor and of the window.
inline void check_run(const std::int64_t* row, std::int64_t number,
                      std::uint64_t tensor_nbytes, std::uint64_t window_nbytes) {
  check(fits(row[1], row[3], row[4], row[5], tensor_nbytes), shm::Code::kInvalid, [&] {
    return "run " + std::to_string(number) + " leaves tensor " +
           std::to_string(row[0]) + ", which has " + std::to_string(tensor_nbytes) +
           " bytes";
  });
  check(fits(row[2], row[3], row[4], row[6], window_nbytes), shm::Code::kInvalid, [&] {
    return "run " + std::to_string(number) + " leaves the window, which has " +
           std::to_string(window_nbytes) + " bytes";
  });
}

// The tensor of a row, of so many.
inline std::size_t tensor_of_run(const std::int64_t* row, std::int64_t number,
                                 std::size_t tensors) {
  const auto index = static_cast<std::size_t>(row[0]);
  check(index < tensors, shm::Code::kInvalid, [&] {
    return "run " + std::to_string(number) + " names tensor " + std::to_string(row[0]) +
           " of " + std::to_string(tensors);
  });
  return index;
}

}  // namespace weightsync
