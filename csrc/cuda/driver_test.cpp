#include "cuda/driver.h"

#include <gtest/gtest.h>

#include "emulator/core.h"
#include "emulator/vmm.h"

namespace weightsync::cuda {
namespace {

constexpr std::size_t kPiece = emulator::kVmmGranularity;

TEST(DriverMappings, MemoryThatIsMappedAgainIsTheSameAndIsThereOnce) {
  auto made = emulator::allocate(0, emulator::Kind::kVmm, kPiece);
  ASSERT_TRUE(made.ok());
  std::byte* const first = made.value().base;
  auto again = map_again(first, kPiece, 0);
  ASSERT_TRUE(again.ok()) << again.status().message();
  auto* const second = static_cast<std::byte*>(again.value());
  first[kPiece - 1] = std::byte{7};
  const auto found = emulator::find_allocation(second + 1);

  EXPECT_NE(first, second);
  EXPECT_EQ(std::byte{7}, second[kPiece - 1]);
  ASSERT_TRUE(found);
  EXPECT_EQ(second, found->base);
  EXPECT_EQ(kPiece, found->nbytes);
  EXPECT_EQ(kPiece, emulator::memory_use(0).used);

  ASSERT_TRUE(emulator::release(first).ok());
  EXPECT_EQ(std::byte{7}, second[kPiece - 1]);
  EXPECT_EQ(kPiece, emulator::memory_use(0).used);
  EXPECT_TRUE(unmap(second, kPiece).ok());
  EXPECT_EQ(0U, emulator::memory_use(0).used);
}

TEST(DriverMappings, OtherMemoryIsRefusedByTheNameOfTheCall) {
  auto made = emulator::allocate(0, emulator::Kind::kMalloc, kPiece);
  ASSERT_TRUE(made.ok());
  const auto again = map_again(made.value().base, kPiece, 0);

  EXPECT_EQ(shm::Code::kSystem, again.status().code());
  EXPECT_EQ(0U, again.status().message().find("cuMemRetainAllocationHandle failed"));
  EXPECT_TRUE(emulator::release(made.value().base).ok());
}

}  // namespace
}  // namespace weightsync::cuda
