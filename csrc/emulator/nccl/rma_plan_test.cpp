#include "emulator/nccl/rma_plan.h"

#include <gtest/gtest.h>

namespace weightsync::emulator::nccl {
namespace {

TEST(RmaPlan, nothing_is_one_piece_with_a_signal) {
  const std::vector<Piece> pieces = cut(0, 10);

  ASSERT_EQ(1U, pieces.size());
  EXPECT_EQ(0U, pieces[0].nbytes);
  EXPECT_TRUE(pieces[0].signal);
}

TEST(RmaPlan, only_the_last_piece_signals) {
  const std::vector<Piece> pieces = cut(25, 10);

  ASSERT_EQ(3U, pieces.size());
  EXPECT_EQ(20U, pieces[2].at);
  EXPECT_EQ(5U, pieces[2].nbytes);
  EXPECT_FALSE(pieces[0].signal);
  EXPECT_FALSE(pieces[1].signal);
  EXPECT_TRUE(pieces[2].signal);
}

TEST(RmaPlan, a_whole_number_of_pieces_has_no_empty_one) {
  EXPECT_EQ(2U, cut(20, 10).size());
  EXPECT_EQ(1U, cut(10, 10).size());
}

TEST(RmaPlan, a_piece_may_end_beyond_the_window_but_not_start_there) {
  EXPECT_EQ(std::nullopt, offset_beyond(cut(100, 10), 0, 91));
  EXPECT_EQ(90U, offset_beyond(cut(100, 10), 0, 90));
  EXPECT_EQ(std::nullopt, offset_beyond(cut(10, 10), 89, 90));
  EXPECT_EQ(90U, offset_beyond(cut(10, 10), 90, 90));
}

TEST(RmaPlan, an_offset_without_data_is_not_looked_at) {
  EXPECT_EQ(std::nullopt, offset_beyond(cut(0, 10), 1000, 90));
}

TEST(RmaPlan, the_target_is_computed_from_the_local_window) {
  EXPECT_EQ(4100U, target_offset(4096, 4, false, 23007));
}

TEST(RmaPlan, before_2_31_2_a_network_forgets_the_offset_of_the_window) {
  EXPECT_EQ(4U, target_offset(4096, 4, true, 23007));
  EXPECT_EQ(4100U, target_offset(4096, 4, true, 23102));
}

}  // namespace
}  // namespace weightsync::emulator::nccl
