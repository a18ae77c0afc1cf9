#include "emulator/nccl/rma_rules.h"

#include <gtest/gtest.h>

#include <functional>
#include <vector>

namespace weightsync::emulator::nccl {
namespace {

PutCall good_put() {
  PutCall call;
  call.common.ranks = 2;
  call.peer = 1;
  return call;
}

struct BrokenRow {
  int row;  // of table 2.1 or 3.1 of the contract
  std::function<void(PutCall&)> spoil;
  ncclResult_t code;
};

// In the order in which NCCL looks at them.
const std::vector<BrokenRow>& put_rows() {
  static const std::vector<BrokenRow> rows{
      {1, [](PutCall& c) { c.common.comm_valid = false; }, ncclInvalidArgument},
      {2, [](PutCall& c) { c.common.revoked = true; }, ncclInvalidUsage},
      {3, [](PutCall& c) { c.common.readiness = ncclRemoteError; }, ncclRemoteError},
      {4, [](PutCall& c) { c.peer = 2; }, ncclInvalidArgument},
      {5, [](PutCall& c) { c.datatype = 12; }, ncclInvalidArgument},
      {6, [](PutCall& c) { c.common.host_rma_support = false; }, ncclInvalidArgument},
      {7, [](PutCall& c) { c.common.driver_recent = false; }, ncclInvalidUsage},
      {8, [](PutCall& c) { c.ctx = 1; }, ncclInvalidArgument},
      {8, [](PutCall& c) { c.sig_idx = 1; }, ncclInvalidArgument},
      {8, [](PutCall& c) { c.flags = 1; }, ncclInvalidArgument},
      {9, [](PutCall& c) { c.window = HandleState::kNull; }, ncclInvalidArgument},
      {10, [](PutCall& c) { c.window = HandleState::kUnknown; }, ncclInternalError},
      {11, [](PutCall& c) { c.source = SourceState::kNull; }, ncclInvalidArgument},
      {12, [](PutCall& c) { c.source = SourceState::kOutside; }, ncclInvalidArgument},
      {12, [](PutCall& c) { c.source = SourceState::kNotSymmetric; },
       ncclInvalidArgument},
      {13, [](PutCall& c) { c.source = SourceState::kNotPutable; },
       ncclInvalidArgument},
      {13, [](PutCall& c) { c.window = HandleState::kNotPutable; },
       ncclInvalidArgument},
  };
  return rows;
}

TEST(PutRules, a_good_put_passes) {
  EXPECT_EQ(ncclSuccess, decide_put(good_put()).code);
}

TEST(PutRules, every_row_refuses_with_its_code) {
  for (const BrokenRow& row : put_rows()) {
    PutCall call = good_put();
    row.spoil(call);

    EXPECT_EQ(row.code, decide_put(call).code) << "row " << row.row;
  }
}

// Of two broken rows, what the earlier one says is said.
TEST(PutRules, the_earlier_row_decides) {
  const std::vector<BrokenRow>& rows = put_rows();
  for (std::size_t first = 0; first < rows.size(); ++first) {
    for (std::size_t later = first + 1; later < rows.size(); ++later) {
      PutCall alone = good_put();
      rows[first].spoil(alone);
      PutCall both = good_put();
      rows[later].spoil(both);
      rows[first].spoil(both);
      const bool same_field = rows[first].row >= 9;  // window and source hold one state
      if (same_field) continue;

      EXPECT_EQ(decide_put(alone).code, decide_put(both).code);
      EXPECT_STREQ(decide_put(alone).found, decide_put(both).found);
    }
  }
}

TEST(PutRules, a_broken_window_comes_before_a_broken_source) {
  PutCall call = good_put();
  call.source = SourceState::kNull;
  call.window = HandleState::kUnknown;
  EXPECT_EQ(ncclInternalError, decide_put(call).code);
  call.window = HandleState::kNotPutable;
  EXPECT_STREQ("localbuff is NULL", decide_put(call).found);
}

TEST(PutRules, a_signal_looks_at_no_window) {
  PutCall call = good_put();
  call.is_put = false;
  call.window = HandleState::kNull;
  call.source = SourceState::kNull;
  EXPECT_EQ(ncclSuccess, decide_put(call).code);
  call.peer = -1;
  EXPECT_EQ(ncclInvalidArgument, decide_put(call).code);
}

TEST(PutRules, from_2_31_on_contexts_and_signals_are_as_many_as_configured) {
  PutCall call = good_put();
  call.common.contexts = 2;
  call.common.signals = 2;
  call.ctx = 1;
  call.sig_idx = 1;
  EXPECT_EQ(ncclSuccess, decide_put(call).code);
  call.ctx = 2;
  EXPECT_EQ(ncclInvalidArgument, decide_put(call).code);
}

TEST(PutRules, from_2_31_on_a_signal_before_any_window_is_invalid_usage) {
  PutCall call = good_put();
  call.is_put = false;
  call.common.signals_exist = false;

  EXPECT_EQ(ncclInvalidUsage, decide_put(call).code);
}

class WaitRules : public ::testing::Test {
 protected:
  Decision decide(WaitCall call = {}) {
    call.common.ranks = 2;
    call.descriptors = static_cast<int>(list_.size());
    call.list = list_.data();
    return decide_wait(call);
  }
  std::vector<ncclWaitSignalDesc_t> list_{{1, 0, 0, 0}, {2, 1, 0, 0}};
};

TEST_F(WaitRules, a_good_wait_passes) { EXPECT_EQ(ncclSuccess, decide().code); }

TEST_F(WaitRules, the_rows_of_the_communicator_come_first) {
  list_.clear();
  WaitCall call;
  call.common.driver_recent = false;
  EXPECT_EQ(ncclInvalidUsage, decide(call).code);
  call.common.host_rma_support = false;
  EXPECT_EQ(ncclInvalidArgument, decide(call).code);
  call.common.readiness = ncclRemoteError;
  EXPECT_EQ(ncclRemoteError, decide(call).code);
  call.common.revoked = true;
  EXPECT_EQ(ncclInvalidUsage, decide(call).code);
  call.common.comm_valid = false;
  EXPECT_EQ(ncclInvalidArgument, decide(call).code);
}

TEST_F(WaitRules, an_empty_or_missing_list_is_refused) {
  WaitCall call;
  call.list = list_.data();
  EXPECT_EQ(ncclInvalidArgument, decide_wait(call).code);
  call.descriptors = 1;
  call.list = nullptr;
  EXPECT_EQ(ncclInvalidArgument, decide_wait(call).code);
}

TEST_F(WaitRules, a_negative_length_is_not_refused) {
  WaitCall call;
  call.descriptors = -1;
  call.list = list_.data();

  EXPECT_EQ(ncclSuccess, decide_wait(call).code);
}

TEST_F(WaitRules, every_descriptor_is_checked) {
  list_[1].opCnt = 0;
  EXPECT_EQ(ncclInvalidArgument, decide().code);
  list_[1] = {1, 1, 1, 0};
  EXPECT_EQ(ncclInvalidArgument, decide().code);
  list_[1] = {1, 1, 0, 1};
  EXPECT_EQ(ncclInvalidArgument, decide().code);
}

TEST_F(WaitRules, the_peer_is_not_checked) {
  list_[0].peer = 99;

  EXPECT_EQ(ncclSuccess, decide().code);
}

TEST_F(WaitRules, from_2_31_on_a_wait_before_any_window_is_invalid_usage) {
  WaitCall call;
  call.common.signals_exist = false;

  EXPECT_EQ(ncclInvalidUsage, decide(call).code);
}

}  // namespace
}  // namespace weightsync::emulator::nccl
