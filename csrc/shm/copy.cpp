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
// In a shorter row the ends, which are not whole lines, cost more than is gained.
constexpr std::size_t kStreamRowFrom = std::size_t{512};
// Each row is a new stream to the prefetchers of a CPU, so the rows to come are fetched
// this far ahead: into the second-level cache, of which a row may take this much.
constexpr std::size_t kAhead = std::size_t{4} << 10;
constexpr std::size_t kFetchRowTo = std::size_t{64} << 10;
constexpr std::size_t kLine = 64;
constexpr std::size_t kBytesPerThread = std::size_t{64} << 20;
constexpr std::size_t kMostThreads = 8;

// Streamed stores bypass the caches; with `kFetching` the same bytes of a row ahead are
// fetched meanwhile.
enum class Stores : std::uint8_t { kCached, kStreamed, kFetching };

#if defined(__x86_64__)
void fetch_line(const std::byte* at) {
  _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T1);
}

template <int kLines, Stores kStores>
__attribute__((target("avx2"))) inline void stream_lines(std::byte* target,
                                                         const std::byte* source,
                                                         const std::byte* ahead) {
  __m256i halves[2 * kLines];
  for (int i = 0; i < 2 * kLines; ++i) {
    halves[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source) + i);
  }
  for (int i = 0; kStores == Stores::kFetching && i < kLines; ++i) {
    fetch_line(ahead + kLine * i);
  }
  for (int i = 0; i < 2 * kLines; ++i) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target) + i, halves[i]);
  }
}

// `target` is aligned to a line, `nbytes` are whole lines.
template <Stores kStores>
__attribute__((target("avx2"))) void stream(std::byte* target, const std::byte* source,
                                            const std::byte* ahead,
                                            std::size_t nbytes) {
  std::size_t at = 0;
  for (; at + 4 * kLine <= nbytes; at += 4 * kLine) {
    stream_lines<4, kStores>(target + at, source + at, ahead + at);
  }
  for (; at < nbytes; at += kLine) {
    stream_lines<1, kStores>(target + at, source + at, ahead + at);
  }
}

template <Stores kStores>
void stream_row(std::byte* target, const std::byte* source, const std::byte* ahead,
                std::size_t nbytes) {
  const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(target) % kLine;
  const std::size_t head = misaligned == 0 ? 0 : kLine - misaligned;
  if (nbytes < kStreamRowFrom && (head != 0 || nbytes % kLine != 0)) {
    for (std::size_t at = 0; kStores == Stores::kFetching && at < nbytes; at += kLine) {
      fetch_line(ahead + at);
    }
    std::memcpy(target, source, nbytes);
    return;
  }
  const std::size_t body = (nbytes - head) / kLine * kLine;
  const std::size_t end = head + body;
  if (head != 0) std::memcpy(target, source, head);
  stream<kStores>(target + head, source + head, ahead + head, body);
  if (end != nbytes) std::memcpy(target + end, source + end, nbytes - end);
}

bool can_stream() {
  static const bool supported = __builtin_cpu_supports("avx2") != 0;
  return supported;
}

// Streamed stores are not ordered with the ones that follow, such as a signal.
void finish_streams() { _mm_sfence(); }
#else
template <Stores>
void stream_row(std::byte* target, const std::byte* source, const std::byte*,
                std::size_t nbytes) {
  std::memcpy(target, source, nbytes);
}

bool can_stream() { return false; }

void finish_streams() {}
#endif

void copy_row(std::byte* target, const std::byte* source, const std::byte* ahead,
              std::size_t nbytes, Stores stores) {
  switch (stores) {
    case Stores::kCached:
      std::memcpy(target, source, nbytes);
      break;
    case Stores::kStreamed:
      stream_row<Stores::kStreamed>(target, source, ahead, nbytes);
      break;
    case Stores::kFetching:
      stream_row<Stores::kFetching>(target, source, ahead, nbytes);
  }
}

bool copy_contiguous(const Run& run, Stores stores,
                     const std::atomic<bool>& cancelled) {
  for (std::size_t at = 0; at < run.row_bytes; at += kSlice) {
    if (cancelled.load(std::memory_order_relaxed)) return false;
    const std::byte* const source = run.source + at;
    copy_row(run.target + at, source, source, std::min(kSlice, run.row_bytes - at),
             stores);
  }
  return true;
}

bool copy_short_rows(const Run& run, Stores stores,
                     const std::atomic<bool>& cancelled) {
  const std::size_t rows_at_once = kSlice / run.row_bytes;
  if (stores == Stores::kStreamed && run.rows > 1 && run.row_bytes <= kFetchRowTo) {
    stores = Stores::kFetching;
  }
  const std::size_t ahead = std::max<std::size_t>(1, kAhead / run.row_bytes);
  for (std::size_t row = 0; row < run.rows;) {
    if (cancelled.load(std::memory_order_relaxed)) return false;
    const std::size_t end = std::min(run.rows, row + rows_at_once);
    for (; row < end; ++row) {
      const std::size_t fetched = std::min(row + ahead, run.rows - 1);
      copy_row(run.target + row * run.target_stride,
               run.source + row * run.source_stride,
               run.source + fetched * run.source_stride, run.row_bytes, stores);
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
  if (!can_stream()) return Stores::kCached;
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
    if (stores == Stores::kStreamed) finish_streams();
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
  const bool whole = std::all_of(runs.begin(), runs.end(), [&](const Run& run) {
    return copy_run(run, stores, cancelled);
  });
  if (stores == Stores::kStreamed) finish_streams();
  return whole;
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
