#include "emulator/nccl/peer_memory.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>

#include "emulator/core.h"
#include "emulator/nccl/operation.h"

namespace weightsync::emulator::nccl {
namespace {

constexpr std::size_t kBytes = 64;

class PeerMemoryOfKind : public testing::TestWithParam<Kind> {
 protected:
  std::byte* make() {
    shm::Result<Allocation> made = allocate(0, GetParam(), kBytes);
    EXPECT_TRUE(made.ok());
    return made.value().base;
  }
};

TEST_P(PeerMemoryOfKind, of_this_process_is_there_as_long_as_it_is_used) {
  std::byte* const mine = make();
  std::memset(mine, 7, kBytes);
  PeerMemory memory;
  const std::shared_ptr<std::byte> mapped = memory.map(locate(mine + 8));
  ASSERT_NE(nullptr, mapped);
  ASSERT_TRUE(release(mine).ok());

  EXPECT_EQ(std::byte{7}, mapped.get()[kBytes - 9]);
}

TEST_P(PeerMemoryOfKind, of_this_process_is_gone_once_it_is_freed) {
  std::byte* const mine = make();
  const Remote remote = locate(mine);
  ASSERT_TRUE(release(mine).ok());

  EXPECT_EQ(nullptr, PeerMemory().map(remote));
}

INSTANTIATE_TEST_SUITE_P(all, PeerMemoryOfKind,
                         testing::Values(Kind::kMalloc, Kind::kVmm));

TEST(PeerMemory, of_the_host_is_used_where_it_is) {
  std::byte mine[kBytes] = {};

  EXPECT_EQ(mine, PeerMemory().map(locate(mine)).get());
}

}  // namespace
}  // namespace weightsync::emulator::nccl
