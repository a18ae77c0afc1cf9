#include "emulator/nccl/config.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "emulator/nccl/config_support.h"

namespace weightsync::emulator::nccl {
namespace {

ncclResult_t code_of(const ncclConfig_t& config) {
  Config parsed;
  return parse_config(&config, Config(), parsed).code();
}

Config parsed_of(const ncclConfig_t& config) {
  Config parsed;
  EXPECT_TRUE(parse_config(&config, Config(), parsed).ok());
  return parsed;
}

TEST(ConfigTest, NothingSetMeansTheDefaultsOfNccl) {
  const Config parsed = parsed_of(undefined_config());

  EXPECT_TRUE(parsed.blocking);
  EXPECT_FALSE(parsed.split_share);
  EXPECT_FALSE(parsed.shrink_share);
  EXPECT_EQ(2, parsed.graph_usage_mode);
  EXPECT_EQ(1, parsed.num_rma_ctx);
  EXPECT_EQ(1, parsed.graph_stream_ordering);
}

TEST(ConfigTest, WhatIsNotSetIsInherited) {
  Config parent;
  parent.blocking = false;
  parent.num_rma_ctx = 0;
  ncclConfig_t config = undefined_config();
  config.splitShare = 1;
  Config inherited;
  Config changed;
  ASSERT_TRUE(parse_config(nullptr, parent, inherited).ok());
  ASSERT_TRUE(parse_config(&config, parent, changed).ok());

  EXPECT_FALSE(inherited.blocking);
  EXPECT_EQ(0, inherited.num_rma_ctx);
  EXPECT_FALSE(changed.blocking);
  EXPECT_TRUE(changed.split_share);
}

TEST(ConfigTest, AConfigWithoutItsInitializerIsRefused) {
  ncclConfig_t config = undefined_config();
  config.magic = 0;

  EXPECT_EQ(ncclInvalidArgument, code_of(config));
}

TEST(ConfigTest, ValuesOutOfRangeAreRefused) {
  const std::vector<std::pair<int ncclConfig_t::*, int>> bad = {
      {&ncclConfig_t::blocking, 2},       {&ncclConfig_t::blocking, -1},
      {&ncclConfig_t::cgaClusterSize, 9}, {&ncclConfig_t::minCTAs, 0},
      {&ncclConfig_t::maxCTAs, 0},        {&ncclConfig_t::splitShare, 2},
      {&ncclConfig_t::shrinkShare, -1},   {&ncclConfig_t::CTAPolicy, 4},
      {&ncclConfig_t::graphUsageMode, 3}, {&ncclConfig_t::graphStreamOrdering, 2},
      {&ncclConfig_t::numRmaCtx, -1},     {&ncclConfig_t::maxP2pPeers, 0},
  };

  for (const auto& [field, value] : bad) {
    ncclConfig_t config = undefined_config();
    config.*field = value;
    EXPECT_EQ(ncclInvalidArgument, code_of(config)) << value;
  }
}

TEST(ConfigTest, MoreCtasAtLeastThanAtMostAreRefused) {
  ncclConfig_t config = undefined_config();
  config.minCTAs = 8;
  config.maxCTAs = 4;

  EXPECT_EQ(ncclInvalidArgument, code_of(config));
}

TEST(ConfigTest, NothingIsReadBeyondTheSizeOfTheCaller) {
  ncclConfig_t whole = undefined_config();
  whole.size = offsetof(ncclConfig_t, splitShare);
  whole.blocking = 0;
  std::vector<std::byte> exact(whole.size);  // the address sanitizer guards its end
  std::memcpy(exact.data(), &whole, exact.size());
  Config parsed;
  const Outcome read =
      parse_config(reinterpret_cast<ncclConfig_t*>(exact.data()), Config(), parsed);

  EXPECT_TRUE(read.ok()) << read.message();
  EXPECT_FALSE(parsed.blocking);
  EXPECT_EQ(1, parsed.num_rma_ctx);
}

TEST(ConfigTest, FieldsThatTheCallersVersionDoesNotKnowAreIgnored) {
  ncclConfig_t config = undefined_config();
  config.version = 22800;
  config.shrinkShare = 1;
  config.numRmaCtx = 0;
  const Config parsed = parsed_of(config);

  EXPECT_TRUE(parsed.shrink_share);
  EXPECT_EQ(1, parsed.num_rma_ctx);
}

TEST(ConfigTest, ANewerCallersLongerConfigIsUnderstood) {
  ncclConfig_t known = undefined_config();
  std::vector<std::byte> longer(sizeof known + 64, std::byte{0x7f});
  known.size = longer.size();
  known.version = 23203;
  known.numRmaCtx = 0;
  std::memcpy(longer.data(), &known, sizeof known);
  Config parsed;
  const Outcome read =
      parse_config(reinterpret_cast<ncclConfig_t*>(longer.data()), Config(), parsed);

  EXPECT_TRUE(read.ok()) << read.message();
  EXPECT_EQ(0, parsed.num_rma_ctx);
}

TEST(ConfigTest, TheEnvironmentOverridesTheCaller) {
  ::setenv("NCCL_COMM_BLOCKING", "0", 1);
  ::setenv("NCCL_NUM_RMA_CTX", "0", 1);
  ::setenv("NCCL_COMM_SPLIT_SHARE_RESOURCES", "1", 1);
  const Config parsed = parsed_of(undefined_config());
  ::unsetenv("NCCL_COMM_BLOCKING");
  ::unsetenv("NCCL_NUM_RMA_CTX");
  ::unsetenv("NCCL_COMM_SPLIT_SHARE_RESOURCES");

  EXPECT_FALSE(parsed.blocking);
  EXPECT_EQ(0, parsed.num_rma_ctx);
  EXPECT_TRUE(parsed.split_share);
}

}  // namespace
}  // namespace weightsync::emulator::nccl
