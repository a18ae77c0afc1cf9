// What needs no communicator: version, ids, texts of errors, and how a thread comes out
// of a failed call.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "emulator/nccl/config_support.h"
#include "emulator/nccl/rank_support.h"
#include "emulator/nccl/window_support.h"

namespace weightsync::emulator::nccl {
namespace {

TEST(General, the_version_is_that_of_nccl) {
  int version = 0;

  EXPECT_EQ(ncclSuccess, ncclGetVersion(&version));
  EXPECT_EQ(23007, version);
  EXPECT_EQ(ncclInvalidArgument, ncclGetVersion(nullptr));
}

TEST(General, every_code_has_the_text_of_nccl) {
  const std::string info = " (run with NCCL_DEBUG=INFO for details)";
  const std::string warn = " (run with NCCL_DEBUG=WARN for details)";
  const std::vector<std::string> texts = {
      "no error",
      "unhandled cuda error" + info,
      "unhandled system error" + info,
      "internal error - please report this issue to the NCCL developers",
      "invalid argument" + warn,
      "invalid usage" + warn,
      "remote process exited or there was a network error",
      "NCCL operation in progress",
      "timeout",
      "unknown result code",
  };

  for (unsigned code = 0; code < texts.size(); ++code) {
    EXPECT_EQ(texts[code], ncclGetErrorString(static_cast<ncclResult_t>(code)));
  }
}

TEST(General, the_last_error_is_one_for_the_process_and_never_null) {
  EXPECT_NE(nullptr, ncclGetLastError(nullptr));
  std::thread([] { EXPECT_EQ(ncclInvalidArgument, ncclGetVersion(nullptr)); }).join();
  ncclResetDebugInit();

  as_threads(1, [](Rank& self) {
    EXPECT_STREQ("ncclGetVersion on the emulator: the version pointer is NULL",
                 ncclGetLastError(self.communicator));
  });
}

TEST(General, ids_are_not_repeated) {
  const ncclUniqueId first = new_unique_id();
  const ncclUniqueId second = new_unique_id();

  EXPECT_NE(0, std::memcmp(&first, &second, sizeof first));
}

TEST(General, with_an_address_from_outside_there_are_no_ids) {
  as_threads(1, [](Rank& self) {
    const Setting address("NCCL_COMM_ID", "127.0.0.1:5000");
    ncclUniqueId id{};

    EXPECT_EQ(ncclInvalidUsage, ncclCommGetUniqueId(self.communicator, &id));
    EXPECT_EQ(ncclInvalidUsage, ncclGetUniqueId(&id));
  });
}

TEST(General, no_config_is_the_defaults) {
  for (const bool scalable : {false, true}) {
    ncclUniqueId id = new_unique_id();
    ncclComm_t comm = nullptr;
    const ncclResult_t made =
        scalable ? ncclCommInitRankScalable(&comm, 1, 0, 1, &id, nullptr)
                 : ncclCommInitRankConfig(&comm, 1, id, 0, nullptr);

    EXPECT_EQ(ncclSuccess, made);
    EXPECT_EQ(ncclSuccess, ncclCommDestroy(comm));
  }
}

TEST(General, a_field_of_the_config_that_is_out_of_range_is_refused) {
  ncclConfig_t config = undefined_config();
  config.CTAPolicy = 4;
  ncclComm_t comm = reinterpret_cast<ncclComm_t>(0x5);

  EXPECT_EQ(ncclInvalidArgument,
            ncclCommInitRankConfig(&comm, 1, new_unique_id(), 0, &config));
  EXPECT_EQ(nullptr, comm);
}

TEST(General, without_contexts_in_the_config_there_are_no_one_sided_calls) {
  ncclConfig_t config = undefined_config();
  config.numRmaCtx = 0;
  const auto refused = [](Rank& self) {
    EXPECT_EQ(ncclInvalidArgument, send_signal(self, 0));
    EXPECT_EQ(ncclInvalidArgument, wait_for(self, 0, 1));
  };
  as_threads(1, refused, config);
}

TEST(General, a_failed_call_leaves_no_group_open) {
  ncclComm_t comm = nullptr;
  EXPECT_EQ(ncclInvalidArgument, ncclCommInitRank(&comm, 0, new_unique_id(), 0));
  EXPECT_EQ(ncclInvalidUsage, ncclGroupEnd());
  int foreign = 0;
  EXPECT_EQ(ncclInvalidArgument,
            ncclCommDestroy(reinterpret_cast<ncclComm_t>(&foreign)));
  EXPECT_EQ(ncclInvalidUsage, ncclGroupEnd());
}

TEST(General, a_failed_inner_group_is_told_by_the_outermost_end) {
  as_threads(1, [](Rank& self) {
    ncclGroupStart();
    ncclGroupStart();
    EXPECT_EQ(ncclInvalidArgument, send_signal(self, 9));
    EXPECT_EQ(ncclSuccess, ncclGroupEnd());
    EXPECT_EQ(ncclInvalidArgument, ncclGroupEnd());
    EXPECT_EQ(ncclSuccess, ncclGroupStart());
    EXPECT_EQ(ncclSuccess, ncclGroupEnd());
  });
}

TEST(General, a_simulated_group_launches_nothing) {
  as_threads(1, [](Rank& self) {
    const TestWindow window(self, 64);
    window.word(0) = 5;
    ncclSimInfo_t info{sizeof info, kNcclSimInfoMagic, kNcclVersion, -1.0F};
    ncclGroupStart();
    EXPECT_EQ(ncclSuccess, put_word(window, self, 0, 0, 1));
    EXPECT_EQ(ncclSuccess, ncclGroupSimulateEnd(&info));
    self.synchronize();
    EXPECT_EQ(0U, window.word(1));
    EXPECT_LE(0.0F, info.estimatedTime);
    ncclGroupStart();
    EXPECT_EQ(ncclSuccess, put_word(window, self, 0, 0, 1));
    EXPECT_EQ(ncclSuccess, ncclGroupSimulateEnd(nullptr));
    self.synchronize();
    EXPECT_EQ(5U, window.word(1));
  });
}

}  // namespace
}  // namespace weightsync::emulator::nccl
