// What the one-sided calls refuse, through the C ABI: tables 2.1 and 3.1 of the
// contract, for what can be observed of them.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "emulator/nccl/window_support.h"

namespace weightsync::emulator::nccl {
namespace {

ncclWindow_t unknown_window() { return reinterpret_cast<ncclWindow_t>(0x5); }

// A put of one byte that is right until a test spoils it.
struct PutOf {
  const void* source = nullptr;
  std::size_t count = 1;
  int datatype = ncclInt8;
  int peer = 0;
  ncclWindow_t window = nullptr;
  std::size_t offset = 0;
  int signal = 0;
  int context = 0;
  unsigned flags = 0;
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;

  ncclResult_t make() const {
    return ncclPutSignal(source, count, static_cast<ncclDataType_t>(datatype), peer,
                         window, offset, signal, context, flags, comm, stream);
  }
};

class Refusals : public ::testing::Test {
 protected:
  // One rank with a window, and the put that is right.
  static void with_put(const std::function<void(const Rank&, const PutOf&)>& act) {
    as_threads(1, [&](const Rank& rank) {
      const TestWindow window(rank, 4096);
      PutOf good;
      good.source = window.data();
      good.window = window.handle();
      good.comm = rank.communicator;
      good.stream = rank.stream;
      act(rank, good);
      EXPECT_EQ(ncclSuccess, good.make());  // nothing is broken afterwards
      rank.synchronize();
    });
  }
};

TEST_F(Refusals, numbers_out_of_range) {
  with_put([](const Rank&, const PutOf& good) {
    for (const auto spoil :
         {+[](PutOf& p) { p.comm = nullptr; },
          +[](PutOf& p) { p.comm = reinterpret_cast<ncclComm_t>(&p); },
          +[](PutOf& p) { p.peer = 1; }, +[](PutOf& p) { p.peer = -1; },
          +[](PutOf& p) { p.datatype = 12; }, +[](PutOf& p) { p.datatype = -1; },
          +[](PutOf& p) { p.context = 1; }, +[](PutOf& p) { p.signal = 1; },
          +[](PutOf& p) { p.flags = 1; }}) {
      PutOf put = good;
      spoil(put);
      EXPECT_EQ(ncclInvalidArgument, put.make());
    }
  });
}

TEST_F(Refusals, windows_and_sources) {
  with_put([](const Rank& rank, const PutOf& good) {
    PutOf put = good;
    put.window = nullptr;
    EXPECT_EQ(ncclInvalidArgument, put.make());
    put.window = unknown_window();
    EXPECT_EQ(ncclInternalError, put.make());
    put = good;
    put.source = nullptr;
    EXPECT_EQ(ncclInvalidArgument, put.make());
    const DeviceBuffer outside(rank.device, 8, Kind::kVmm);
    put.source = outside.data();
    EXPECT_EQ(ncclInvalidArgument, put.make());
    const std::string text = ncclGetLastError(nullptr);
    EXPECT_NE(std::string::npos, text.find("ncclPutSignal on the emulator"));
    EXPECT_NE(std::string::npos, text.find("NCCL_WIN_COLL_SYMMETRIC"));
  });
}

TEST_F(Refusals, a_source_in_a_window_that_is_not_symmetric) {
  with_put([](const Rank& rank, const PutOf& good) {
    const DeviceBuffer memory(rank.device, 4096, Kind::kVmm);
    ncclWindow_t plain = nullptr;
    ASSERT_EQ(ncclSuccess, ncclCommWindowRegister(rank.communicator, memory.data(),
                                                  4096, &plain, kNcclWindowDefault));
    PutOf put = good;
    put.source = memory.data();
    EXPECT_EQ(ncclInvalidArgument, put.make());
    // As a target it will do.
    put = good;
    put.window = plain;
    EXPECT_EQ(ncclSuccess, put.make());
    rank.synchronize();
    EXPECT_EQ(ncclSuccess, ncclCommWindowDeregister(rank.communicator, plain));
  });
}

TEST_F(Refusals, an_offset_is_compared_with_the_local_window_at_launch_only) {
  with_put([](const Rank& rank, const PutOf& good) {
    PutOf put = good;
    put.offset = 4096;
    ncclGroupStart();
    EXPECT_EQ(ncclSuccess, put.make());
    EXPECT_EQ(ncclInvalidArgument, ncclGroupEnd());
    // It may end beyond the window, in the rest of the allocation.
    put.offset = 4000;
    put.count = 1000;
    EXPECT_EQ(ncclSuccess, put.make());
    rank.synchronize();
  });
}

TEST_F(Refusals, strictness_also_looks_at_ends) {
  const Setting strict("WEIGHTSYNC_EMULATOR_STRICT", "1");
  with_put([](const Rank&, const PutOf& good) {
    PutOf put = good;
    put.offset = 4000;
    put.count = 97;
    EXPECT_EQ(ncclInvalidArgument, put.make());
    put = good;
    put.source = static_cast<const std::byte*>(good.source) + 4000;
    put.count = 97;
    EXPECT_EQ(ncclInvalidArgument, put.make());
    put.count = 96;
    EXPECT_EQ(ncclSuccess, put.make());
  });
}

TEST_F(Refusals, a_deregistered_window) {
  with_put([](const Rank& rank, const PutOf& good) {
    PutOf put = good;
    {
      const TestWindow other(rank, 64);
      put.window = other.handle();
      EXPECT_EQ(ncclSuccess, put.make());
      rank.synchronize();
    }
    EXPECT_EQ(ncclInternalError, put.make());
  });
}

TEST_F(Refusals, lists_of_descriptors) {
  with_put([](const Rank& rank, const PutOf&) {
    ncclComm_t comm = rank.communicator;
    ncclWaitSignalDesc_t each{1, 0, 0, 0};
    EXPECT_EQ(ncclInvalidArgument, ncclWaitSignal(0, &each, comm, rank.stream));
    EXPECT_EQ(ncclInvalidArgument, ncclWaitSignal(1, nullptr, comm, rank.stream));
    EXPECT_EQ(ncclInvalidArgument, ncclWaitSignal(1, &each, nullptr, rank.stream));
    EXPECT_EQ(ncclSuccess, ncclWaitSignal(-1, &each, comm, rank.stream));
    for (const ncclWaitSignalDesc_t bad :
         {ncclWaitSignalDesc_t{0, 0, 0, 0}, ncclWaitSignalDesc_t{-1, 0, 0, 0},
          ncclWaitSignalDesc_t{1, 0, 1, 0}, ncclWaitSignalDesc_t{1, 0, 0, 1}}) {
      each = bad;
      EXPECT_EQ(ncclInvalidArgument, ncclWaitSignal(1, &each, comm, rank.stream));
    }
    // Found at launch only: it would go to a proxy that is not there.
    each = {1, 7, 0, 0};
    EXPECT_EQ(ncclInternalError, ncclWaitSignal(1, &each, comm, rank.stream));
  });
}

TEST_F(Refusals, everything_after_a_revoke) {
  as_threads(1, [](Rank& rank) {
    const TestWindow window(rank, 64);
    EXPECT_EQ(ncclSuccess, ncclCommRevoke(rank.communicator, 0));
    EXPECT_EQ(ncclInvalidUsage, put_word(window, rank, 0, 0, 1));
    EXPECT_EQ(ncclInvalidUsage, send_signal(rank, 0));
    EXPECT_EQ(ncclInvalidUsage, wait_for(rank, 0, 1));
    // Before the peer is looked at.
    EXPECT_EQ(ncclInvalidUsage, send_signal(rank, 9));
  });
}

TEST_F(Refusals, one_sided_calls_where_the_configuration_has_no_context) {
  const Setting none("NCCL_NUM_RMA_CTX", "0");
  as_threads(1, [](const Rank& rank) {
    const TestWindow window(rank, 64);
    EXPECT_NE(nullptr, window.handle());
    EXPECT_EQ(ncclInvalidArgument, put_word(window, rank, 0, 0, 1));
    EXPECT_EQ(ncclInvalidArgument, send_signal(rank, 0));
    EXPECT_EQ(ncclInvalidArgument, wait_for(rank, 0, 1));
  });
}

}  // namespace
}  // namespace weightsync::emulator::nccl
