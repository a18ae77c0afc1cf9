#include "vmm.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>

namespace weightsync::emulator {
namespace {

using shm::Code;

constexpr std::size_t kMemory = std::size_t{64} << 20;
constexpr std::size_t kPiece = kVmmGranularity;

class VmmTest : public testing::Test {
 protected:
  // Two pieces of addresses, and memory of one piece for each.
  void SetUp() override {
    base_ = static_cast<std::byte*>(vmm_.reserve(2 * kPiece, 0).take());
    first_ = vmm_.create({0, kPiece, 1}).take();
    second_ = vmm_.create({0, kPiece, 1}).take();
  }

  Memory memory_{2, kMemory};
  Vmm vmm_{memory_};
  std::byte* base_ = nullptr;
  VmmHandle first_ = 0;
  VmmHandle second_ = 0;
};

TEST_F(VmmTest, WhatIsMappedCanBeUsed) {
  ASSERT_TRUE(vmm_.map(base_, kPiece, 0, first_).ok());
  ASSERT_TRUE(vmm_.set_access(base_, kPiece, VmmAccess::kReadWrite).ok());
  std::memset(base_, 7, kPiece);
  const auto found = memory_.find(base_ + 5);

  ASSERT_TRUE(found);
  EXPECT_EQ(Kind::kVmm, found->kind);
  EXPECT_EQ(base_, found->base);
  EXPECT_EQ(std::byte{7}, found->segment->data()[5]);
}

TEST_F(VmmTest, AdjacentMappingsAreOneRange) {
  ASSERT_TRUE(vmm_.map(base_, kPiece, 0, first_).ok());
  EXPECT_FALSE(memory_.check_range(base_, 2 * kPiece).ok());
  ASSERT_TRUE(vmm_.map(base_ + kPiece, kPiece, 0, second_).ok());

  EXPECT_TRUE(memory_.check_range(base_, 2 * kPiece).ok());
}

TEST_F(VmmTest, MemoryIsGivenBackWithItsLastHandleAndMapping) {
  ASSERT_TRUE(vmm_.map(base_, kPiece, 0, first_).ok());
  ASSERT_TRUE(vmm_.release(first_).ok());
  EXPECT_EQ(2 * kPiece, memory_.use(0).used);
  ASSERT_TRUE(vmm_.unmap(base_, kPiece).ok());

  EXPECT_EQ(kPiece, memory_.use(0).used);
  EXPECT_FALSE(memory_.find(base_));
  EXPECT_EQ(Code::kInvalid, vmm_.release(first_).code());
}

TEST_F(VmmTest, AHandleIsRetainedByAddress) {
  ASSERT_TRUE(vmm_.map(base_, kPiece, 0, first_).ok());

  EXPECT_EQ(first_, vmm_.retain(base_ + 100).take());
  EXPECT_TRUE(vmm_.release(first_).ok());
  EXPECT_TRUE(vmm_.traits(first_));
  EXPECT_TRUE(vmm_.release(first_).ok());
  EXPECT_FALSE(vmm_.traits(first_));
}

TEST_F(VmmTest, PlainMemoryHasNoHandle) {
  const Allocation plain = memory_.allocate(0, Kind::kMalloc, 100).take();

  EXPECT_EQ(Code::kInvalid, vmm_.retain(plain.base).status().code());
}

TEST_F(VmmTest, RefusesWhatDoesNotFit) {
  EXPECT_FALSE(vmm_.reserve(kPiece + 1, 0).ok());
  EXPECT_FALSE(vmm_.create({0, 100, 1}).ok());
  EXPECT_FALSE(vmm_.map(base_ + 100, kPiece, 0, first_).ok());
  EXPECT_FALSE(vmm_.map(base_, 2 * kPiece, 0, first_).ok());
  EXPECT_FALSE(vmm_.map(base_ + 2 * kPiece, kPiece, 0, first_).ok());
  EXPECT_FALSE(vmm_.map(base_, kPiece, kPiece, first_).ok());
  EXPECT_FALSE(vmm_.map(base_, kPiece, 0, 99).ok());
  EXPECT_FALSE(vmm_.unmap(base_, kPiece).ok());
  EXPECT_FALSE(vmm_.set_access(base_, kPiece, VmmAccess::kRead).ok());
}

TEST_F(VmmTest, ARangeInUseIsNeitherMappedAgainNorFreed) {
  ASSERT_TRUE(vmm_.map(base_, kPiece, 0, first_).ok());

  EXPECT_FALSE(vmm_.map(base_, kPiece, 0, second_).ok());
  EXPECT_FALSE(vmm_.free_range(base_, 2 * kPiece).ok());
  EXPECT_TRUE(vmm_.unmap(base_, kPiece).ok());
  EXPECT_FALSE(vmm_.free_range(base_, kPiece).ok());
  EXPECT_TRUE(vmm_.free_range(base_, 2 * kPiece).ok());
}

TEST_F(VmmTest, AnExportedDescriptorIsTheSameMemory) {
  const int fd = vmm_.export_fd(first_).take();
  const VmmHandle same = vmm_.import_fd(0, fd).take();
  ::close(fd);
  ASSERT_TRUE(vmm_.map(base_, kPiece, 0, first_).ok());
  ASSERT_TRUE(vmm_.map(base_ + kPiece, kPiece, 0, same).ok());
  ASSERT_TRUE(vmm_.set_access(base_, 2 * kPiece, VmmAccess::kReadWrite).ok());
  base_[3] = std::byte{9};

  EXPECT_EQ(std::byte{9}, base_[kPiece + 3]);
  EXPECT_EQ(2 * kPiece, memory_.use(0).used);
}

TEST_F(VmmTest, ForeignDescriptorsAreNoMemory) {
  int ends[2] = {};
  ASSERT_EQ(0, ::pipe(ends));

  EXPECT_FALSE(vmm_.import_fd(0, ends[0]).ok());
  EXPECT_FALSE(vmm_.import_fd(0, -1).ok());
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST_F(VmmTest, AddressesKeepTheirAlignment) {
  constexpr std::size_t kAlignment = 16 * kPiece;
  void* const aligned = vmm_.reserve(kPiece, kAlignment).take();

  EXPECT_EQ(0U, reinterpret_cast<std::uintptr_t>(aligned) % kAlignment);
  EXPECT_TRUE(vmm_.free_range(aligned, kPiece).ok());
}

}  // namespace
}  // namespace weightsync::emulator
