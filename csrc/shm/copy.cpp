#include "copy.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "owned_thread.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace weightsync::shm {
namespace {

// A run is looked at for cancellation this often: 4 MiB take about 0.3 ms.
constexpr std::size_t kSlice = std::size_t{4} << 20;
// A batch below this had better stay in the cache for whoever reads it next; from here
// on it drives itself out of the cache, and stores around it are 1.3 to 2.5 times as
// fast.
constexpr std::size_t kStreamFrom = std::size_t{16} << 20;
// In a shorter run the ends, which are not whole lines, cost more than is gained.
constexpr std::size_t kStreamRunFrom = std::size_t{4} << 10;
constexpr std::size_t kBytesPerThread = std::size_t{64} << 20;
constexpr std::size_t kMostThreads = 8;

#if defined(__x86_64__)
// `target` is 64-byte aligned, `nbytes` a multiple of 256.
__attribute__((target("avx2"))) void stream_avx2(std::byte* target,
                                                 const std::byte* source,
                                                 std::size_t nbytes) {
  for (std::size_t at = 0; at < nbytes; at += 256) {
    __m256i lines[8];
    for (int i = 0; i < 8; ++i) {
      lines[i] =
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + at + 32 * i));
    }
    for (int i = 0; i < 8; ++i) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(target + at + 32 * i), lines[i]);
    }
  }
  _mm_sfence();
}

bool can_stream() {
  static const bool supported = __builtin_cpu_supports("avx2") != 0;
  return supported;
}
#endif

enum class Stores : std::uint8_t { kCached, kStreamed };

void copy_bytes(std::byte* target, const std::byte* source, std::size_t nbytes,
                [[maybe_unused]] Stores stores) {
#if defined(__x86_64__)
  if (stores == Stores::kStreamed && nbytes >= kStreamRunFrom && can_stream()) {
    const std::size_t head = (64 - reinterpret_cast<std::uintptr_t>(target) % 64) % 64;
    const std::size_t body = (nbytes - head) / 256 * 256;
    std::memcpy(target, source, head);
    stream_avx2(target + head, source + head, body);
    std::memcpy(target + head + body, source + head + body, nbytes - head - body);
    return;
  }
#endif
  std::memcpy(target, source, nbytes);
}

bool copy_contiguous(const Run& run, Stores stores,
                     const std::atomic<bool>& cancelled) {
  for (std::size_t at = 0; at < run.row_bytes; at += kSlice) {
    if (cancelled.load(std::memory_order_relaxed)) return false;
    copy_bytes(run.target + at, run.source + at, std::min(kSlice, run.row_bytes - at),
               stores);
  }
  return true;
}

bool copy_short_rows(const Run& run, Stores stores,
                     const std::atomic<bool>& cancelled) {
  const std::size_t rows_at_once = kSlice / run.row_bytes;
  for (std::size_t row = 0; row < run.rows;) {
    if (cancelled.load(std::memory_order_relaxed)) return false;
    const std::size_t end = std::min(run.rows, row + rows_at_once);
    for (; row < end; ++row) {
      copy_bytes(run.target + row * run.target_stride,
                 run.source + row * run.source_stride, run.row_bytes, stores);
    }
  }
  return true;
}

bool copy_run(const Run& run, Stores stores, const std::atomic<bool>& cancelled) {
  if (run.rows == 0 || run.row_bytes == 0) return true;
  if (run.row_bytes <= kSlice) return copy_short_rows(run, stores, cancelled);
  for (std::size_t row = 0; row < run.rows; ++row) {
    const Run one{run.source + row * run.source_stride,
                  run.target + row * run.target_stride,
                  1,
                  run.row_bytes,
                  0,
                  0};
    if (!copy_contiguous(one, stores, cancelled)) return false;
  }
  return true;
}

Stores stores_for(const std::vector<Run>& runs) {
  std::size_t nbytes = 0;
  for (const Run& run : runs) {
    nbytes += run.rows * run.row_bytes;
    if (nbytes >= kStreamFrom) return Stores::kStreamed;
  }
  return Stores::kCached;
}

// Cuts long runs, the contiguous and the strided, so that threads can share them.
std::vector<Run> shared_out(const std::vector<Run>& runs) {
  std::vector<Run> pieces;
  pieces.reserve(runs.size());
  for (const Run& run : runs) {
    if (run.rows == 0 || run.row_bytes == 0) continue;
    if (run.rows == 1) {
      for (std::size_t at = 0; at < run.row_bytes; at += kSlice) {
        pieces.push_back({run.source + at, run.target + at, 1,
                          std::min(kSlice, run.row_bytes - at), 0, 0});
      }
      continue;
    }
    const std::size_t rows = std::max<std::size_t>(1, kSlice / run.row_bytes);
    for (std::size_t row = 0; row < run.rows; row += rows) {
      pieces.push_back({run.source + row * run.source_stride,
                        run.target + row * run.target_stride,
                        std::min(rows, run.rows - row), run.row_bytes,
                        run.source_stride, run.target_stride});
    }
  }
  return pieces;
}

bool copy_together(const std::vector<Run>& runs, Stores stores, int threads,
                   const std::atomic<bool>& cancelled) {
  const std::vector<Run> pieces = shared_out(runs);
  std::atomic<std::size_t> next{0};
  std::atomic<bool> whole{true};
  const auto work = [&] {
    for (std::size_t i = next++; i < pieces.size(); i = next++) {
      if (!copy_run(pieces[i], stores, cancelled)) whole = false;
    }
  };
  std::vector<OwnedThread> others(static_cast<std::size_t>(threads - 1));
  for (OwnedThread& other : others) {
    // Where no more threads are to be had, those that are there do it.
    if (!other.start(work).ok()) break;
  }
  work();
  for (OwnedThread& other : others) other.join();
  return whole;
}

}  // namespace

bool copy_runs(const std::vector<Run>& runs, int threads,
               const std::atomic<bool>& cancelled) {
  const Stores stores = stores_for(runs);
  if (threads > 1) return copy_together(runs, stores, threads, cancelled);
  for (const Run& run : runs) {
    if (!copy_run(run, stores, cancelled)) return false;
  }
  return true;
}

int useful_threads(std::size_t nbytes) {
  if (nbytes < 2 * kBytesPerThread) return 1;
  // Asked once: the answer is read from a file.
  static const unsigned machine = std::thread::hardware_concurrency();
  const std::size_t by_machine = std::max(1U, machine / 8);
  return static_cast<int>(
      std::min({by_machine, nbytes / kBytesPerThread, kMostThreads}));
}

}  // namespace weightsync::shm
