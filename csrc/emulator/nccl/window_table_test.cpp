#include "emulator/nccl/window_table.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace weightsync::emulator::nccl {
namespace {

std::array<std::byte, 100> memory;

ncclWindow_t handle(std::uintptr_t number) {
  return reinterpret_cast<ncclWindow_t>(number);
}

Window window(std::size_t first, std::size_t nbytes, int flags = 0) {
  Window made;
  made.base = memory.data() + first;
  made.nbytes = nbytes;
  made.flags = flags;
  made.stride_use = 1000;
  return made;
}

TEST(WindowTable, a_window_is_found_by_handle_and_by_address) {
  WindowTable table;
  table.add(handle(1), window(10, 20));

  EXPECT_EQ(memory.data() + 10, table.find(handle(1))->base);
  EXPECT_EQ(nullptr, table.find(handle(2)));
  EXPECT_EQ(nullptr, table.find_address(memory.data() + 9));
  EXPECT_NE(nullptr, table.find_address(memory.data() + 10));
  EXPECT_NE(nullptr, table.find_address(memory.data() + 29));
  EXPECT_EQ(nullptr, table.find_address(memory.data() + 30));
}

TEST(WindowTable, a_nested_window_hides_the_outer_one_beyond_it) {
  WindowTable table;
  table.add(handle(1), window(0, 100, 1));
  table.add(handle(2), window(40, 10, 2));

  EXPECT_EQ(1, table.find_address(memory.data() + 39)->flags);
  EXPECT_EQ(2, table.find_address(memory.data() + 45)->flags);
  EXPECT_EQ(nullptr, table.find_address(memory.data() + 50));
}

TEST(WindowTable, of_equal_starts_the_last_registered_counts) {
  WindowTable table;
  table.add(handle(1), window(0, 100, 1));
  table.add(handle(2), window(0, 50, 2));

  EXPECT_EQ(2, table.find_address(memory.data() + 20)->flags);
  EXPECT_EQ(nullptr, table.find_address(memory.data() + 60));
}

TEST(WindowTable, of_equal_starts_removal_hides_the_last_registered) {
  WindowTable table;
  table.add(handle(1), window(0, 100, 1));
  table.add(handle(2), window(0, 50, 2));

  EXPECT_TRUE(table.remove(handle(1)));
  EXPECT_EQ(nullptr, table.find(handle(1)));
  EXPECT_EQ(2, table.find(handle(2))->flags);
  EXPECT_EQ(1, table.find_address(memory.data() + 60)->flags);
}

TEST(WindowTable, a_handle_is_removed_once) {
  WindowTable table;
  table.add(handle(1), window(0, 100));

  EXPECT_TRUE(table.remove(handle(1)));
  EXPECT_FALSE(table.remove(handle(1)));
  EXPECT_EQ(nullptr, table.find_address(memory.data()));
  EXPECT_EQ(0U, table.size());
}

TEST(WindowTable, the_address_space_in_use_is_counted) {
  WindowTable table;
  table.add(handle(1), window(0, 10));
  table.add(handle(2), window(10, 10));
  EXPECT_EQ(2000U, table.stride_used());
  table.remove(handle(1));

  EXPECT_EQ(1000U, table.stride_used());
}

TEST(WindowTable, overlap_is_noticed_but_touching_is_not) {
  WindowTable table;
  table.add(handle(1), window(10, 20));

  EXPECT_EQ(nullptr, table.overlapping(memory.data(), 10));
  EXPECT_NE(nullptr, table.overlapping(memory.data(), 11));
  EXPECT_NE(nullptr, table.overlapping(memory.data() + 29, 1));
  EXPECT_EQ(nullptr, table.overlapping(memory.data() + 30, 1));
}

}  // namespace
}  // namespace weightsync::emulator::nccl
