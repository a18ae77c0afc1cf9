#include "emulator/nccl/window_rules.h"

#include <gtest/gtest.h>

#include <cstddef>

namespace weightsync::emulator::nccl {
namespace {

RegisterCall good_register() {
  static std::byte buffer[8];
  RegisterCall call;
  call.buffer = buffer;
  call.nbytes = sizeof buffer;
  return call;
}

RegisterMemory good_memory() { return {MemoryKind::kVirtual, 8192, 4096, 1 << 21}; }

TEST(RegisterRules, a_good_call_is_queued) {
  const RegisterDecision decision = decide_register_call(good_register());

  EXPECT_EQ(RegisterAction::kQueue, decision.action);
  EXPECT_EQ(ncclSuccess, decision.decision.code);
}

// The rows in their order: each call breaks its own row and all later ones.
TEST(RegisterRules, the_first_broken_row_decides) {
  RegisterCall call = good_register();
  call.readiness = ncclInProgress;
  EXPECT_EQ(ncclInProgress, decide_register_call(call).decision.code);
  call.symmetric_support = false;
  EXPECT_EQ(RegisterAction::kLeaveNull, decide_register_call(call).action);
  EXPECT_EQ(ncclSuccess, decide_register_call(call).decision.code);
  call.nbytes = 0;
  const RegisterDecision no_bytes = decide_register_call(call);
  EXPECT_EQ(RegisterAction::kRefuse, no_bytes.action);
  EXPECT_EQ(ncclInvalidArgument, no_bytes.decision.code);
  call.handle_given = false;
  const Decision no_handle = decide_register_call(call).decision;
  EXPECT_STRNE(no_bytes.decision.found, no_handle.found);
  EXPECT_EQ(ncclInvalidArgument, no_handle.code);
  call.comm_valid = false;
  const Decision no_communicator = decide_register_call(call).decision;
  EXPECT_STRNE(no_handle.found, no_communicator.found);
  EXPECT_EQ(ncclInvalidArgument, no_communicator.code);
}

TEST(RegisterRules, a_null_buffer_is_refused) {
  RegisterCall call = good_register();
  call.buffer = nullptr;

  EXPECT_EQ(ncclInvalidArgument, decide_register_call(call).decision.code);
}

TEST(RegisterRules, virtual_memory_at_a_page_is_accepted) {
  EXPECT_EQ(ncclSuccess, decide_register_memory(good_memory()).code);
}

TEST(RegisterRules, memory_that_is_none_is_a_cuda_error) {
  RegisterMemory memory = good_memory();
  memory.kind = MemoryKind::kNone;
  memory.offset = 1;

  EXPECT_EQ(ncclUnhandledCudaError, decide_register_memory(memory).code);
}

TEST(RegisterRules, alignment_counts_from_the_allocation_and_comes_before_the_kind) {
  RegisterMemory memory = good_memory();
  memory.kind = MemoryKind::kPlainDevice;
  memory.offset = 4097;
  EXPECT_EQ(ncclInvalidArgument, decide_register_memory(memory).code);
  memory.offset = 4096;
  EXPECT_EQ(ncclUnhandledCudaError, decide_register_memory(memory).code);
}

TEST(RegisterRules, the_size_needs_no_alignment_but_has_to_fit) {
  RegisterMemory memory = good_memory();
  memory.nbytes = 3;
  EXPECT_EQ(ncclSuccess, decide_register_memory(memory).code);
  memory.nbytes = memory.allocation_bytes - memory.offset + 1;
  EXPECT_EQ(ncclUnhandledCudaError, decide_register_memory(memory).code);
}

TEST(RegisterRules, host_memory_of_the_vmm_can_be_registered) {
  RegisterMemory memory = good_memory();
  memory.kind = MemoryKind::kVirtualHost;

  EXPECT_EQ(ncclSuccess, decide_register_memory(memory).code);
}

TEST(DeregisterRules, the_communicator_comes_before_the_handle) {
  EXPECT_EQ(ncclInvalidArgument, decide_deregister({false, false, false}).code);
  EXPECT_EQ(ncclSuccess, decide_deregister({true, false, false}).code);
  EXPECT_EQ(ncclInternalError, decide_deregister({true, true, false}).code);
  EXPECT_EQ(ncclSuccess, decide_deregister({true, true, true}).code);
}

TEST(UserPointerRules, every_row_has_its_code) {
  EXPECT_EQ(ncclSuccess, decide_user_pointer({true, true, true, true, true}).code);
  EXPECT_EQ(ncclInternalError,
            decide_user_pointer({true, true, true, true, false}).code);
  EXPECT_EQ(ncclInvalidArgument,
            decide_user_pointer({true, true, true, false, false}).code);
  EXPECT_EQ(ncclSuccess, decide_user_pointer({true, true, false, false, false}).code);
  EXPECT_EQ(ncclInvalidArgument,
            decide_user_pointer({true, false, false, false, false}).code);
  EXPECT_EQ(ncclInvalidArgument,
            decide_user_pointer({false, true, true, true, true}).code);
}

}  // namespace
}  // namespace weightsync::emulator::nccl
