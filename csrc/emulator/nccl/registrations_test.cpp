#include "emulator/nccl/registrations.h"

#include <gtest/gtest.h>

#include <cstddef>

namespace weightsync::emulator::nccl {
namespace {

std::byte memory[100];

TEST(Registrations, a_buffer_registered_twice_is_deregistered_twice) {
  Registrations registrations;
  void* const first = registrations.add(memory, 50);
  void* const second = registrations.add(memory, 50);

  EXPECT_EQ(first, second);
  EXPECT_TRUE(registrations.remove(first));
  EXPECT_TRUE(registrations.remove(first));
  EXPECT_FALSE(registrations.remove(first));
  EXPECT_EQ(0U, registrations.size());
}

TEST(Registrations, a_part_of_a_registered_buffer_has_its_handle) {
  Registrations registrations;
  void* const whole = registrations.add(memory, 50);

  EXPECT_EQ(whole, registrations.add(memory + 10, 40));
  EXPECT_NE(whole, registrations.add(memory + 10, 41));
  EXPECT_EQ(2U, registrations.size());
}

TEST(Registrations, a_handle_is_not_used_again) {
  Registrations registrations;
  void* const first = registrations.add(memory, 50);
  registrations.remove(first);

  EXPECT_NE(first, registrations.add(memory, 50));
  EXPECT_NE(nullptr, first);
}

}  // namespace
}  // namespace weightsync::emulator::nccl
