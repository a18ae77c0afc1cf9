#include "emulator/nccl/collective_plan.h"

#include <gtest/gtest.h>

#include <vector>

namespace weightsync::emulator::nccl {
namespace {

constexpr int kRanks = 4;
constexpr int kRoot = 2;

CollectiveDescriptor of(Collective kind) {
  CollectiveDescriptor asked;
  asked.kind = kind;
  asked.type = DataType::kFloat32;
  asked.root = has_root(kind) ? kRoot : 0;
  asked.count = 3;
  return asked;
}

struct Expected {
  Collective kind;
  std::size_t input;  // blocks of count elements, of a rank that is not the root
  std::size_t output;
  std::size_t root_input;
  std::size_t root_output;
};

TEST(CollectivePlan, every_rank_reads_and_writes_what_nccl_documents) {
  const std::vector<Expected> table = {
      {Collective::kAllReduce, 1, 1, 1, 1}, {Collective::kReduce, 1, 0, 1, 1},
      {Collective::kBroadcast, 0, 1, 1, 1}, {Collective::kReduceScatter, 4, 1, 4, 1},
      {Collective::kAllGather, 1, 4, 1, 4}, {Collective::kAllToAll, 4, 4, 4, 4},
      {Collective::kGather, 1, 0, 1, 4},    {Collective::kScatter, 0, 1, 4, 1},
  };
  for (const Expected& row : table) {
    const CollectivePlan other = plan(of(row.kind), 1, kRanks);
    const CollectivePlan root = plan(of(row.kind), kRoot, kRanks);

    EXPECT_EQ(12U, other.block);
    EXPECT_EQ(12 * row.input, other.input) << function_of(row.kind);
    EXPECT_EQ(12 * row.output, other.output) << function_of(row.kind);
    EXPECT_EQ(12 * row.root_input, root.input) << function_of(row.kind);
    EXPECT_EQ(12 * row.root_output, root.output) << function_of(row.kind);
  }
}

bool overlaps_at(Collective kind, int rank, std::size_t output) {
  alignas(16) static std::byte memory[512];
  return overlaps(plan(of(kind), rank, kRanks), memory + 128, memory + output);
}

TEST(CollectivePlan, works_in_place_where_nccl_does) {
  EXPECT_FALSE(overlaps_at(Collective::kAllReduce, 1, 128));
  EXPECT_FALSE(overlaps_at(Collective::kReduce, kRoot, 128));
  EXPECT_FALSE(overlaps_at(Collective::kBroadcast, kRoot, 128));
  EXPECT_FALSE(overlaps_at(Collective::kReduceScatter, 1, 128 + 12));
  EXPECT_FALSE(overlaps_at(Collective::kAllGather, 3, 128 - 36));
  EXPECT_FALSE(overlaps_at(Collective::kGather, kRoot, 128 - 24));
  EXPECT_FALSE(overlaps_at(Collective::kScatter, kRoot, 128 + 24));
}

TEST(CollectivePlan, any_other_overlap_is_found) {
  EXPECT_TRUE(overlaps_at(Collective::kAllReduce, 1, 132));
  EXPECT_TRUE(overlaps_at(Collective::kAllReduce, 1, 120));
  EXPECT_TRUE(overlaps_at(Collective::kReduceScatter, 1, 128));
  EXPECT_TRUE(overlaps_at(Collective::kAllGather, 3, 128));
  EXPECT_TRUE(overlaps_at(Collective::kAllToAll, 0, 128));
  EXPECT_FALSE(overlaps_at(Collective::kAllReduce, 1, 140));
  EXPECT_FALSE(overlaps_at(Collective::kReduce, 1, 130));  // its output is not used
  EXPECT_FALSE(overlaps_at(Collective::kBroadcast, 1, 130));
}

TEST(CollectivePlan, ranks_that_agree_have_nothing_to_say) {
  std::vector<CollectiveDescriptor> all(2, of(Collective::kReduce));
  all[1].factor = 3;
  all[1].call_site = text_of("elsewhere");

  EXPECT_TRUE(disagreement(all).empty());
}

TEST(CollectivePlan, every_difference_is_told_with_both_call_sites) {
  std::vector<CollectiveDescriptor> all(2, of(Collective::kReduce));
  all[0].call_site = text_of("here+0x1");
  all[1].call_site = text_of("there+0x2");
  all[1].count = 5;

  EXPECT_EQ((std::vector<std::string>{
                "rank 0 called ncclReduce of 3 float32 (sum, root 2) from here+0x1",
                "rank 1 called ncclReduce of 5 float32 (sum, root 2) from there+0x2"}),
            disagreement(all));

  const auto disagrees = [](auto change) {
    std::vector<CollectiveDescriptor> two(2, of(Collective::kReduce));
    change(two[1]);
    return !disagreement(two).empty();
  };
  EXPECT_TRUE(disagrees([](auto& other) { other.kind = Collective::kAllReduce; }));
  EXPECT_TRUE(disagrees([](auto& other) { other.type = DataType::kInt32; }));
  EXPECT_TRUE(disagrees([](auto& other) { other.root = 0; }));
  EXPECT_TRUE(disagrees([](auto& other) { other.reduction = Reduction::kMaximum; }));
}

TEST(CollectivePlan, shares_cover_every_element_once) {
  for (const std::size_t count : {1, 1023, 1024, 1025, 5000, 100000}) {
    for (const int size : {1, 2, 3, 16}) {
      std::size_t next = 0;
      for (int rank = 0; rank < size; ++rank) {
        const Share share = share_of(count, rank, size);
        EXPECT_TRUE(share.count == 0 || share.first == next);
        next += share.count;
      }

      EXPECT_EQ(count, next);
    }
  }
}

TEST(CollectivePlan, every_collective_has_its_own_name_and_fault) {
  for (int first = 0; first < 8; ++first) {
    for (int second = 0; second < first; ++second) {
      EXPECT_STRNE(function_of(static_cast<Collective>(first)),
                   function_of(static_cast<Collective>(second)));
      EXPECT_NE(fault_of(static_cast<Collective>(first)),
                fault_of(static_cast<Collective>(second)));
    }
  }
}

}  // namespace
}  // namespace weightsync::emulator::nccl
