// ncclParam*: the parameters of the log, and no others.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <string>

#include "emulator/nccl/symbols.h"
#include "emulator/nccl/window_support.h"

namespace weightsync::emulator::nccl {
namespace {

constexpr const char* kKey = "NCCL_DEBUG_SUBSYS";

ncclParamHandle_t bound() {
  ncclParamHandle_t handle = nullptr;
  EXPECT_EQ(ncclSuccess, ncclParamBind(&handle, kKey));
  return handle;
}

template <class Number>
void expect_number(ncclResult_t (*get)(ncclParamHandle_t, Number*)) {
  Number found = 0;
  EXPECT_EQ(ncclSuccess, get(bound(), &found));
  EXPECT_EQ(Number{21}, found);
  EXPECT_EQ(ncclInvalidArgument, get(bound(), nullptr));
  EXPECT_EQ(ncclInvalidArgument, get(nullptr, &found));
}

TEST(Parameters, one_that_is_unknown_is_refused) {
  const char* value = nullptr;
  int length = 0;
  ncclParamHandle_t handle = nullptr;

  EXPECT_EQ(ncclInvalidArgument, ncclParamBind(&handle, "NCCL_NUM_RMA_CTX"));
  EXPECT_EQ(ncclInvalidArgument, ncclParamBind(&handle, nullptr));
  EXPECT_EQ(ncclInvalidArgument, ncclParamBind(nullptr, kKey));
  EXPECT_EQ(nullptr, handle);
  EXPECT_EQ(ncclInvalidArgument,
            ncclParamGetParameter("NCCL_NUM_RMA_CTX", &value, &length));
  EXPECT_EQ(ncclInvalidArgument, ncclParamGetParameter(nullptr, &value, &length));
  EXPECT_EQ(ncclInvalidArgument, ncclParamGetParameter(kKey, nullptr, &length));
}

TEST(Parameters, a_number_is_read_in_any_width) {
  const Setting setting(kKey, "21");

  expect_number(ncclParamGetI8);
  expect_number(ncclParamGetI16);
  expect_number(ncclParamGetI32);
  expect_number(ncclParamGetI64);
  expect_number(ncclParamGetU8);
  expect_number(ncclParamGetU16);
  expect_number(ncclParamGetU32);
  expect_number(ncclParamGetU64);
}

TEST(Parameters, what_is_no_number_is_read_as_text_only) {
  const Setting setting(kKey, "COLL,RMA");
  std::int32_t number = 7;
  const char* text = nullptr;
  char bytes[16] = {};
  int length = 0;

  EXPECT_EQ(ncclInvalidArgument, ncclParamGetI32(bound(), &number));
  EXPECT_EQ(7, number);
  EXPECT_EQ(ncclSuccess, ncclParamGetStr(bound(), &text));
  EXPECT_STREQ("COLL,RMA", text);
  EXPECT_EQ(ncclInvalidArgument, ncclParamGetStr(nullptr, &text));
  EXPECT_EQ(ncclSuccess, ncclParamGet(bound(), bytes, sizeof bytes, &length));
  EXPECT_EQ("COLL,RMA", std::string(bytes, static_cast<std::size_t>(length)));
  EXPECT_EQ(ncclInvalidArgument, ncclParamGet(bound(), bytes, 7, &length));
  EXPECT_EQ(ncclSuccess, ncclParamGetParameter(kKey, &text, &length));
  EXPECT_EQ("COLL,RMA", std::string(text, static_cast<std::size_t>(length)));
}

TEST(Parameters, all_keys_can_be_asked_for) {
  const char** keys = nullptr;
  int count = 0;
  ASSERT_EQ(ncclSuccess, ncclParamGetAllParameterKeys(&keys, &count));
  const char* value = nullptr;

  EXPECT_EQ(3, count);
  for (int i = 0; i < count; ++i) {
    EXPECT_EQ(ncclSuccess, ncclParamGetParameter(keys[i], &value, nullptr)) << keys[i];
  }
  EXPECT_EQ(ncclInvalidArgument, ncclParamGetAllParameterKeys(nullptr, &count));
  EXPECT_EQ(ncclInvalidArgument, ncclParamGetAllParameterKeys(&keys, nullptr));
}

TEST(Parameters, all_can_be_printed) {
  const Setting setting(kKey, "RMA");
  testing::internal::CaptureStderr();
  ncclParamDumpAll();

  EXPECT_NE(std::string::npos,
            testing::internal::GetCapturedStderr().find("NCCL_DEBUG_SUBSYS=RMA\n"));
}

}  // namespace
}  // namespace weightsync::emulator::nccl
