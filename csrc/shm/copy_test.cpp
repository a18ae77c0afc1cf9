#include "copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>

namespace weightsync::shm {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::byte kUntouched{0xA5};

using Bytes = std::vector<std::byte>;
using Runs = std::vector<Run>;  // testing::Test has a Run, too

// No byte is that of an untouched target, so a missed one shows.
Bytes noise(std::size_t nbytes, std::uint32_t seed = 1) {
  Bytes bytes(nbytes);
  std::uint32_t state = seed;
  for (std::byte& byte : bytes) {
    state = state * 1664525 + 1013904223;
    byte = static_cast<std::byte>(state >> 24);
    if (byte == kUntouched) byte = std::byte{0};
  }
  return bytes;
}

std::byte* aligned(Bytes& bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(bytes.data());
  return bytes.data() + (64 - address % 64) % 64;
}

bool all_untouched(const std::byte* from, const std::byte* to) {
  return std::all_of(from, to, [](std::byte byte) { return byte == kUntouched; });
}

bool copy(const std::vector<Run>& runs, int threads = 1) {
  const std::atomic<bool> cancelled{false};
  return copy_runs(runs, threads, cancelled);
}

// A run that makes its batch a large one, copied with other stores, and costs nothing.
class Ballast {
 public:
  Run run() { return {row_.data(), row_.data() + kRow, 16 * kMiB / kRow, kRow, 0, 0}; }

 private:
  static constexpr std::size_t kRow = 4096;
  Bytes row_ = Bytes(2 * kRow);
};

class CopySizes : public testing::TestWithParam<std::size_t> {
 protected:
  static void expect_exact(const Runs& company) {
    const std::size_t nbytes = GetParam();
    Bytes source = noise(nbytes + 256);
    Bytes target(nbytes + 512);
    for (const std::size_t from : {0, 1, 7}) {
      for (const std::size_t to : {0, 1, 31, 63}) {
        const std::byte* const begin = aligned(source) + from;
        std::byte* const end = target.data() + target.size();
        std::byte* const at = aligned(target) + 64 + to;
        std::fill(target.data(), end, kUntouched);
        Runs runs = company;
        runs.push_back({begin, at, 1, nbytes, 0, 0});

        ASSERT_TRUE(copy(runs));

        ASSERT_EQ(0, std::memcmp(begin, at, nbytes)) << from << " to " << to;
        ASSERT_TRUE(all_untouched(target.data(), at)) << "before " << from << " " << to;
        ASSERT_TRUE(all_untouched(at + nbytes, end)) << "behind " << from << " " << to;
      }
    }
  }
};

TEST_P(CopySizes, AreExactAtEveryAlignment) { expect_exact({}); }

TEST_P(CopySizes, AreExactInALargeBatch) {
  Ballast ballast;
  expect_exact({ballast.run()});
}

INSTANTIATE_TEST_SUITE_P(AroundThresholds, CopySizes,
                         testing::Values(0, 1, 63, 64, 65, 128, 511, 512, 513, 4095,
                                         4096, 4097, kMiB - 1, kMiB, kMiB + 1,
                                         4 * kMiB - 1, 4 * kMiB, 4 * kMiB + 1,
                                         5 * kMiB + 13),
                         testing::PrintToStringParamName());

struct Rows {
  std::size_t rows;
  std::size_t row_bytes;
  std::size_t source_gap;
  std::size_t target_gap;
};

class CopyRows : public testing::TestWithParam<Rows> {};

TEST_P(CopyRows, MovesTheRowsAndNothingBetween) {
  const Rows& shape = GetParam();
  const std::size_t source_stride = shape.row_bytes + shape.source_gap;
  const std::size_t target_stride = shape.row_bytes + shape.target_gap;
  const Bytes source = noise(shape.rows * source_stride);
  Bytes expected(shape.rows * target_stride, kUntouched);
  for (std::size_t row = 0; row < shape.rows; ++row) {
    std::copy_n(source.data() + row * source_stride, shape.row_bytes,
                expected.data() + row * target_stride);
  }
  Ballast ballast;
  for (const std::size_t to : {0, 24}) {
    for (const int threads : {1, 3}) {
      for (const bool large : {false, true}) {
        Bytes target(expected.size() + 128, kUntouched);
        std::byte* const at = aligned(target) + to;
        Runs runs{{source.data(), at, shape.rows, shape.row_bytes, source_stride,
                   target_stride}};
        // Pieces of the ballast would write the same bytes at once.
        if (large && threads == 1) runs.push_back(ballast.run());

        ASSERT_TRUE(copy(runs, threads));

        EXPECT_TRUE(std::equal(expected.begin(), expected.end(), at))
            << threads << " threads to " << to;
        EXPECT_TRUE(all_untouched(target.data(), at));
        EXPECT_TRUE(all_untouched(at + expected.size(), target.data() + target.size()));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, CopyRows,
    testing::Values(Rows{1, 5, 3, 1}, Rows{1000, 1, 1, 2}, Rows{333, 63, 1, 0},
                    Rows{200, 64, 64, 0}, Rows{99, 320, 64, 64}, Rows{99, 511, 1, 0},
                    Rows{99, 520, 8, 0}, Rows{100, 4096, 0, 1}, Rows{20, 65536, 64, 0},
                    Rows{20, 65600, 64, 64}, Rows{3000, 3000, 500, 7},
                    Rows{3, kMiB + 1, 5, 3}, Rows{2, 4 * kMiB + 9, 0, 64}),
    [](const auto& each) {
      return std::to_string(each.param.rows) + "Of" +
             std::to_string(each.param.row_bytes);
    });

TEST(Copy, CarriesOutAllRunsOnAnyNumberOfThreads) {
  const Bytes source = noise(20 * kMiB);
  for (const int threads : {1, 2, 5}) {
    Bytes target(source.size(), kUntouched);
    Runs runs;
    std::size_t at = 0;
    for (std::size_t i = 0; at < source.size(); ++i) {
      const std::size_t wanted = i % 7 == 6 ? 5 * kMiB + i : i * 1000;
      const std::size_t nbytes = std::min(wanted, source.size() - at);
      runs.push_back({source.data() + at, target.data() + at, 1, nbytes, 0, 0});
      at += nbytes;
    }

    ASSERT_TRUE(copy(runs, threads));

    EXPECT_TRUE(source == target) << threads << " threads";
  }
}

TEST(Copy, OfNothingIsDone) {
  EXPECT_TRUE(copy({}));
  EXPECT_TRUE(copy({}, 4));
  EXPECT_TRUE(copy({{nullptr, nullptr, 0, 100, 100, 100}}, 1));
  EXPECT_TRUE(copy({{nullptr, nullptr, 100, 0, 0, 0}}, 4));
}

TEST(Copy, DoesNothingWhenCancelledBefore) {
  const Bytes source = noise(100);
  Bytes target(100, kUntouched);
  const std::atomic<bool> cancelled{true};

  EXPECT_FALSE(copy_runs({{source.data(), target.data(), 1, 100, 0, 0}}, 1, cancelled));

  EXPECT_TRUE(all_untouched(target.data(), target.data() + target.size()));
}

// Runs that would take minutes; several land on the same bytes, one thread at a time.
void expect_to_stop(const Run& run) {
  const std::vector<Run> runs(100'000, run);
  std::atomic<bool> cancelled{false};
  std::thread canceller([&] { cancelled = true; });

  EXPECT_FALSE(copy_runs(runs, 1, cancelled));

  canceller.join();
}

TEST(Copy, StopsWithinALongRunWhenCancelled) {
  const Bytes source = noise(8 * kMiB);
  Bytes target(8 * kMiB);

  expect_to_stop({source.data(), target.data(), 1, source.size(), 0, 0});
}

TEST(Copy, StopsWithinStridedRowsWhenCancelled) {
  const Bytes source = noise(8 * kMiB);
  Bytes target(8 * kMiB);

  expect_to_stop({source.data(), target.data(), 8 * kMiB / 128, 64, 128, 128});
}

TEST(Copy, SeveralThreadsStopWhenCancelled) {
  const Bytes source = noise(64 * kMiB);
  Bytes target(64 * kMiB);
  std::atomic<bool> cancelled{true};

  EXPECT_FALSE(copy_runs({{source.data(), target.data(), 1, source.size(), 0, 0}}, 4,
                         cancelled));
}

TEST(Copy, UsesAtLeastOneThreadAndAtMostEight) {
  for (const std::size_t nbytes : {std::size_t{0}, kMiB, kMiB << 20}) {
    EXPECT_LE(1, useful_threads(nbytes));
    EXPECT_GE(8, useful_threads(nbytes));
  }
  EXPECT_EQ(1, useful_threads(kMiB));
}

}  // namespace
}  // namespace weightsync::shm
