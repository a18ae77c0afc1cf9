#include "memory.h"

#include <gtest/gtest.h>

#include <string>

namespace weightsync::emulator {
namespace {

using shm::Code;

constexpr std::size_t kMemory = std::size_t{64} << 20;

TEST(MemoryTest, FindsAnAllocationByAnyOfItsAddresses) {
  Memory memory(2, kMemory);
  const Allocation made = memory.allocate(1, Kind::kMalloc, 1000).take();

  EXPECT_EQ(made.id, memory.find(made.base + 999)->id);
  EXPECT_EQ(1, memory.find(made.base)->device);
  EXPECT_FALSE(memory.find(made.base + 1000));
  EXPECT_FALSE(memory.find(made.base - 1));
  EXPECT_FALSE(memory.find(&memory));
}

TEST(MemoryTest, CountsWhatADeviceHolds) {
  Memory memory(2, kMemory);
  const Allocation first = memory.allocate(0, Kind::kMalloc, 1000).take();
  const Allocation second = memory.allocate(0, Kind::kMalloc, 500).take();
  ASSERT_TRUE(memory.release(first.base).ok());

  EXPECT_EQ(500U, memory.use(0).used);
  EXPECT_EQ(1500U, memory.use(0).peak);
  EXPECT_EQ(1U, memory.use(0).allocations);
  EXPECT_EQ(0U, memory.use(1).used);
  EXPECT_EQ(kMemory, memory.use(1).total);
  EXPECT_TRUE(memory.release(second.base).ok());
}

TEST(MemoryTest, PinnedMemoryIsOnNoDevice) {
  Memory memory(1, kMemory);
  const Allocation pinned = memory.allocate(0, Kind::kHost, 1000).take();

  EXPECT_EQ(0U, memory.use(0).used);
  EXPECT_EQ(Kind::kHost, memory.find(pinned.base)->kind);
}

TEST(MemoryTest, RunsOutAtTheSizeOfTheDevice) {
  Memory memory(1, kMemory);
  const Allocation most = memory.allocate(0, Kind::kMalloc, kMemory - 1).take();
  const auto more = memory.allocate(0, Kind::kMalloc, 2);

  EXPECT_EQ(Code::kSystem, more.status().code());
  EXPECT_NE(std::string::npos, more.status().message().find("asked for 2 bytes"));
  EXPECT_EQ(1U, memory.use(0).allocations);
  EXPECT_EQ(kMemory - 1, most.nbytes);
}

TEST(MemoryTest, AFilterMakesItRunOutSooner) {
  Memory memory(1, kMemory);
  memory.set_filter(
      [](int, std::size_t used, std::size_t nbytes) { return used + nbytes <= 100; });

  EXPECT_TRUE(memory.allocate(0, Kind::kMalloc, 60).ok());
  EXPECT_FALSE(memory.allocate(0, Kind::kMalloc, 60).ok());
  EXPECT_TRUE(memory.allocate(0, Kind::kMalloc, 40).ok());
}

TEST(MemoryTest, ARangeMustNotLeaveItsAllocation) {
  Memory memory(1, kMemory);
  const Allocation made = memory.allocate(0, Kind::kMalloc, 1000).take();

  EXPECT_TRUE(memory.check_range(made.base + 400, 600).ok());
  EXPECT_EQ(Code::kInvalid, memory.check_range(made.base + 400, 601).code());
  EXPECT_EQ(Code::kInvalid, memory.check_range(&memory, 1).code());
}

TEST(MemoryTest, FreesOnlyWhatWasAllocatedAndOnce) {
  Memory memory(1, kMemory);
  const Allocation made = memory.allocate(0, Kind::kMalloc, 1000).take();

  EXPECT_EQ(Code::kInvalid, memory.release(made.base + 1).code());
  EXPECT_TRUE(memory.release(made.base).ok());
  EXPECT_EQ(Code::kInvalid, memory.release(made.base).code());
}

TEST(MemoryTest, KnowsRegisteredMemoryWithoutOwningIt) {
  Memory memory(1, kMemory);
  std::byte bytes[100] = {};
  Allocation host;
  host.device = 0;
  host.kind = Kind::kHostRegistered;
  host.base = bytes;
  host.nbytes = sizeof bytes;
  Allocation within = host;
  within.base += 10;
  within.nbytes = 5;

  EXPECT_TRUE(memory.add(host).ok());
  EXPECT_EQ(Code::kInvalid, memory.add(within).code());
  EXPECT_EQ(Code::kInvalid, memory.release(bytes).code());
  EXPECT_TRUE(memory.remove(bytes));
  EXPECT_FALSE(memory.find(bytes));
}

}  // namespace
}  // namespace weightsync::emulator
