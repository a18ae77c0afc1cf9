// Copies of many contiguous and strided runs, as fast as one core moves memory.
//
// Large batches use non-temporal stores, which do not read the destination first:
// measured 1.2 to 2.5 times as fast as memcpy beyond the cache (docs/benchmarks.md).
// Runs must not overlap.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace weightsync::shm {

// `rows` pieces of `row_bytes`, each stride apart. Strides and sizes in bytes.
struct Run {
  const std::byte* source;
  std::byte* target;
  std::size_t rows;
  std::size_t row_bytes;
  std::size_t source_stride;
  std::size_t target_stride;
};

// Executes all runs on up to `threads` threads. Returns false if `cancelled` became
// true before the end; what was copied by then is unspecified. All stores are visible
// to any thread or process that sees a store made after this returns.
bool copy_runs(const std::vector<Run>& runs, int threads,
               const std::atomic<bool>& cancelled);

// How many threads pay for `nbytes` on this machine: one core saturates the memory of a
// small machine, and starting a thread costs as much as copying a few hundred KiB.
int useful_threads(std::size_t nbytes);

}  // namespace weightsync::shm
