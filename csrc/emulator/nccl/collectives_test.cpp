// The collectives through the C ABI, between threads and between processes.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cuda/abi.h"
#include "emulator/nccl/collective_plan.h"
#include "emulator/nccl/rank_support.h"
#include "emulator/nccl/reduce.h"
#include "emulator/nccl/window_support.h"

extern "C" {
cudaError_t cudaHostRegister(void* address, std::size_t nbytes, unsigned flags);
cudaError_t cudaHostUnregister(void* address);
}

namespace weightsync::emulator::nccl {
namespace {

using Buffer = std::vector<std::byte>;

// What a rank puts in: the same for all who ask.
Buffer input_of(int rank, std::size_t nbytes) {
  std::mt19937 random(static_cast<unsigned>(rank) + 1);
  Buffer input(nbytes + 4);
  for (std::size_t at = 0; at < nbytes; at += 4) {
    const auto word = static_cast<std::uint32_t>(random());
    std::memcpy(&input[at], &word, sizeof word);
  }
  input.resize(nbytes);
  return input;
}

bool holds(const std::byte* memory, const Buffer& what) {
  return what.empty() || std::memcmp(memory, what.data(), what.size()) == 0;
}

struct Case {
  Collective kind;
  DataType type = DataType::kFloat32;
  std::size_t count = 1;
  ncclRedOp_t op = ncclSum;
  int root = 0;
  bool in_place = false;
};

CollectiveDescriptor descriptor_of(const Case& each) {
  CollectiveDescriptor asked;
  asked.kind = each.kind;
  asked.type = each.type;
  asked.count = each.count;
  asked.root = each.root;
  asked.reduction = static_cast<Reduction>(each.op);
  return asked;
}

ncclResult_t call(const Case& each, const void* send, void* receive, const Rank& rank) {
  const auto type = static_cast<ncclDataType_t>(each.type);
  ncclComm_t comm = rank.communicator;
  switch (each.kind) {
    case Collective::kAllReduce:
      return ncclAllReduce(send, receive, each.count, type, each.op, comm, rank.stream);
    case Collective::kReduce:
      return ncclReduce(send, receive, each.count, type, each.op, each.root, comm,
                        rank.stream);
    case Collective::kBroadcast:
      return ncclBroadcast(send, receive, each.count, type, each.root, comm,
                           rank.stream);
    case Collective::kReduceScatter:
      return ncclReduceScatter(send, receive, each.count, type, each.op, comm,
                               rank.stream);
    case Collective::kAllGather:
      return ncclAllGather(send, receive, each.count, type, comm, rank.stream);
    case Collective::kAllToAll:
      return ncclAlltoAll(send, receive, each.count, type, comm, rank.stream);
    case Collective::kGather:
      return ncclGather(send, receive, each.count, type, each.root, comm, rank.stream);
    case Collective::kScatter:
      break;
  }
  return ncclScatter(send, receive, each.count, type, each.root, comm, rank.stream);
}

// What this rank shall find in its output.
Buffer expected_of(const Case& each, int rank, int size) {
  const CollectiveDescriptor asked = descriptor_of(each);
  const CollectivePlan mine = plan(asked, rank, size);
  std::vector<Buffer> inputs;
  for (int other = 0; other < size; ++other) {
    inputs.push_back(input_of(other, plan(asked, other, size).input));
  }
  Buffer output(mine.output);
  const std::size_t block = mine.block;
  if (reduces(each.kind)) {
    const std::size_t first =
        each.kind == Collective::kReduceScatter ? block * rank : 0;
    std::vector<ReductionInput> all;
    for (const Buffer& input : inputs) all.push_back({input.data() + first});
    if (mine.output > 0) {
      reduce_elements(asked.reduction, each.type, all, output.data(), each.count);
    }
    return output;
  }
  for (std::size_t at = 0; at < mine.output; at += block) {
    const bool from_root =
        each.kind == Collective::kBroadcast || each.kind == Collective::kScatter;
    const std::size_t source = from_root ? each.root : at / block;
    const bool of_mine =
        each.kind == Collective::kScatter || each.kind == Collective::kAllToAll;
    std::memcpy(output.data() + at,
                inputs[source].data() + (of_mine ? block * rank : 0), block);
  }
  return output;
}

void check(const Case& each, const Rank& rank) {
  const CollectivePlan mine = plan(descriptor_of(each), rank.rank, rank.size);
  // Room for both buffers side by side, or one inside the other.
  const std::size_t whole = mine.block * static_cast<std::size_t>(rank.size);
  const DeviceBuffer memory(rank.device, 2 * whole + 1);
  std::byte* input = memory.data() + 1;  // aligned to nothing
  std::byte* output = input + whole;
  if (each.in_place) {
    output = input + std::max<std::ptrdiff_t>(*mine.in_place, 0);
    input = output - *mine.in_place;
  }
  const Buffer given = input_of(rank.rank, mine.input);
  std::copy(given.begin(), given.end(), input);
  ASSERT_EQ(ncclSuccess, call(each, mine.input > 0 ? input : nullptr,
                              mine.output > 0 ? output : nullptr, rank));
  rank.synchronize();
  const Buffer expected = expected_of(each, rank.rank, rank.size);

  EXPECT_TRUE(holds(output, expected))
      << describe(descriptor_of(each)) << (each.in_place ? " in place" : "")
      << " on rank " << rank.rank << " of " << rank.size;
  if (!each.in_place) {
    EXPECT_TRUE(holds(input, given));
  }
}

constexpr Collective kAll[] = {
    Collective::kAllReduce,     Collective::kReduce,    Collective::kBroadcast,
    Collective::kReduceScatter, Collective::kAllGather, Collective::kAllToAll,
    Collective::kGather,        Collective::kScatter,
};

void check_every_collective_of(const Rank& rank,
                               const std::vector<std::size_t>& counts) {
  for (const Collective kind : kAll) {
    for (const std::size_t count : counts) {
      for (const bool in_place : {false, true}) {
        if (in_place && kind == Collective::kAllToAll) continue;
        const int root = has_root(kind) ? rank.size - 1 : 0;
        check({kind, DataType::kFloat32, count, ncclSum, root, in_place}, rank);
      }
    }
  }
}

void check_every_collective(const Rank& rank) {
  check_every_collective_of(rank, {1, 100, 17003});
}

void check_every_type_and_operator(const Rank& rank) {
  for (int type = 0; type < kDataTypes; ++type) {
    for (int op = 0; op < kBuiltInReductions; ++op) {
      check({Collective::kAllReduce, static_cast<DataType>(type), 600,
             static_cast<ncclRedOp_t>(op)},
            rank);
    }
    check({Collective::kAllGather, static_cast<DataType>(type), 7}, rank);
  }
}

TEST(Collectives, give_what_nccl_documents) {
  for (const int size : {1, 2, 5}) {
    as_threads(size, check_every_collective);
  }
}

// Two on each device.
TEST(Collectives, work_among_sixteen_ranks) {
  const Setting shared("NCCL_MULTI_RANK_GPU_ENABLE", "1");
  as_threads(16, [](Rank& rank) {
    check_every_collective_of(rank, {1, 200});
    check({Collective::kAllReduce, DataType::kFloat8E4M3, 70000}, rank);
  });
}

TEST(Collectives, reduce_every_type_with_every_operator) {
  as_threads(3, check_every_type_and_operator);
}

// Bodies of processes are disabled: each is run by a test below, as its own program.
TEST(DISABLED_RankProcess, collectives) {
  be_this_process([](Rank& rank) {
    check_every_collective(rank);
    check_every_type_and_operator(rank);
  });
}

TEST(CollectivesAcrossProcesses, give_what_nccl_documents) {
  EXPECT_EQ((std::vector<int>{0, 0, 0}),
            as_processes(3, "DISABLED_RankProcess.collectives"));
}

TEST(Collectives, read_their_input_when_they_execute_not_when_they_are_called) {
  as_threads(2, [](Rank& rank) {
    const DeviceBuffer memory(rank.device, 8);
    auto* const values = reinterpret_cast<std::int32_t*>(memory.data());
    values[0] = -1;
    stream_of(rank.stream)->enqueue("a kernel", [values] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      values[0] = 21;
    });
    ASSERT_EQ(ncclSuccess, ncclAllReduce(values, values + 1, 1, ncclInt32, ncclSum,
                                         rank.communicator, rank.stream));
    rank.synchronize();

    EXPECT_EQ(42, values[1]);
  });
}

TEST(Collectives, of_nothing_succeed_at_once_even_if_others_do_not_come) {
  as_threads(2, [](Rank& rank) {
    if (rank.rank == 0) return;

    EXPECT_EQ(ncclSuccess, ncclAllReduce(nullptr, nullptr, 0, ncclInt32, ncclSum,
                                         rank.communicator, rank.stream));
  });
}

TEST(Collectives, of_a_group_all_run) {
  as_threads(2, [](Rank& rank) {
    const DeviceBuffer memory(rank.device, 16);
    auto* const values = reinterpret_cast<std::int32_t*>(memory.data());
    values[0] = rank.rank + 1;
    values[1] = 10 * (rank.rank + 1);
    ASSERT_EQ(ncclSuccess, ncclGroupStart());
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(ncclSuccess, ncclAllReduce(values + i, values + 2 + i, 1, ncclInt32,
                                           ncclSum, rank.communicator, rank.stream));
    }
    ASSERT_EQ(ncclSuccess, ncclGroupEnd());
    rank.synchronize();

    EXPECT_EQ(3, values[2]);
    EXPECT_EQ(30, values[3]);
  });
}

TEST(Collectives, do_not_keep_an_abort_waiting_for_ranks_that_never_come) {
  as_threads(2, [](Rank& rank) {
    if (rank.rank == 1) return;
    const DeviceBuffer memory(rank.device, 4);
    ASSERT_EQ(ncclSuccess, ncclAllReduce(memory.data(), memory.data(), 1, ncclInt32,
                                         ncclSum, rank.communicator, rank.stream));
    ASSERT_EQ(ncclSuccess, ncclCommAbort(rank.communicator));
    rank.communicator = nullptr;
    rank.synchronize();
  });
}

TEST(DISABLED_RankProcess, counts_differ) {
  be_this_process([](Rank& rank) {
    const DeviceBuffer memory(rank.device, 64);
    ncclAllReduce(memory.data(), memory.data(), rank.rank == 0 ? 4 : 5, ncclInt32,
                  ncclSum, rank.communicator, rank.stream);
    rank.synchronize();
  });
}

TEST(CollectivesAcrossProcesses, that_disagree_are_diagnosed) {
  EXPECT_EQ((std::vector<int>{86, 86}),
            as_processes(2, "DISABLED_RankProcess.counts_differ"));
}

TEST(DISABLED_RankProcess, host_memory) {
  be_this_process([](Rank& rank) {
    std::vector<std::int32_t> memory(4);
    ncclAllReduce(memory.data(), memory.data(), 4, ncclInt32, ncclSum,
                  rank.communicator, rank.stream);
    rank.synchronize();
    ncclResult_t failure = ncclSuccess;
    ncclCommGetAsyncError(rank.communicator, &failure);

    EXPECT_EQ(ncclUnhandledCudaError, failure);
    EXPECT_EQ(ncclSuccess, ncclCommAbort(rank.communicator));
    rank.communicator = nullptr;
  });
}

TEST(CollectivesAcrossProcesses, on_host_memory_fail_as_a_kernel_would) {
  EXPECT_EQ((std::vector<int>{0, 0}),
            as_processes(2, "DISABLED_RankProcess.host_memory"));
}

// Memory that peers cannot map: it takes part through a stand-in.
void check_registered_memory(const Rank& rank) {
  constexpr std::size_t kCount = 30000;
  std::vector<float> values(2 * kCount, 0.0F);
  std::fill_n(values.begin(), kCount, 1.5F);
  float* const input = values.data();
  float* const output = input + kCount;
  ASSERT_EQ(0, cudaHostRegister(input, values.size() * sizeof(float), 0));
  for (const std::size_t count : {std::size_t{1}, kCount}) {
    ASSERT_EQ(ncclSuccess, ncclAllReduce(input, output, count, ncclFloat32, ncclSum,
                                         rank.communicator, rank.stream));
    rank.synchronize();

    EXPECT_EQ(1.5F * static_cast<float>(rank.size), output[count - 1]);
  }
  ASSERT_EQ(ncclSuccess, ncclGroupStart());
  EXPECT_EQ(ncclSuccess, ncclSend(input, kCount, ncclFloat32, 1 - rank.rank,
                                  rank.communicator, rank.stream));
  EXPECT_EQ(ncclSuccess, ncclRecv(output, kCount, ncclFloat32, 1 - rank.rank,
                                  rank.communicator, rank.stream));
  ASSERT_EQ(ncclSuccess, ncclGroupEnd());
  rank.synchronize();

  EXPECT_EQ(1.5F, output[kCount - 1]);
  EXPECT_EQ(0, cudaHostUnregister(input));
}

TEST(DISABLED_RankProcess, registered_memory) {
  be_this_process(check_registered_memory);
}

TEST(CollectivesAcrossProcesses, work_on_memory_that_peers_cannot_map) {
  as_threads(2, check_registered_memory);

  EXPECT_EQ((std::vector<int>{0, 0}),
            as_processes(2, "DISABLED_RankProcess.registered_memory"));
}

TEST(DISABLED_RankProcess, three_all_reduces) {
  be_this_process([](Rank& rank) {
    const DeviceBuffer memory(rank.device, 4);
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(ncclSuccess, ncclAllReduce(memory.data(), memory.data(), 1, ncclInt32,
                                           ncclSum, rank.communicator, rank.stream));
    }
    rank.synchronize();
  });
}

TEST(CollectivesAcrossProcesses, obey_faults_where_they_execute) {
  EXPECT_EQ((std::vector<int>{86, -SIGKILL}),
            as_processes(2, "DISABLED_RankProcess.three_all_reduces",
                         {"WEIGHTSYNC_EMULATOR_HANG_SECONDS=1",
                          "WEIGHTSYNC_EMULATOR_FAULTS=all_reduce@rank=1,n=2:kill"}));
  EXPECT_EQ((std::vector<int>{0, 0}),
            as_processes(2, "DISABLED_RankProcess.three_all_reduces",
                         {"WEIGHTSYNC_EMULATOR_FAULTS=all_reduce@n=2:delay=0.01"}));
}

TEST(Collectives, work_on_pinned_memory_and_on_windows_memory) {
  as_threads(2, [](Rank& rank) {
    for (const Kind kind : {Kind::kHost, Kind::kVmm, Kind::kManaged}) {
      const DeviceBuffer memory(rank.device, 8, kind);
      auto* const values = reinterpret_cast<std::int32_t*>(memory.data());
      values[0] = rank.rank + 1;
      ASSERT_EQ(ncclSuccess, ncclAllReduce(values, values + 1, 1, ncclInt32, ncclSum,
                                           rank.communicator, rank.stream));
      rank.synchronize();

      EXPECT_EQ(3, values[1]);
    }
  });
}

}  // namespace
}  // namespace weightsync::emulator::nccl
