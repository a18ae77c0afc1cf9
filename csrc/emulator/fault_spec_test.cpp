#include "emulator/fault_spec.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

namespace weightsync::emulator {
namespace {

using Kind = Action::Kind;

FaultSpec parsed(std::string_view text) {
  auto spec = parse_faults(text);
  EXPECT_TRUE(spec.ok()) << spec.status().message();
  return spec.ok() ? spec.take() : FaultSpec{};
}

std::string refusal(std::string_view text) {
  const auto spec = parse_faults(text);
  EXPECT_FALSE(spec.ok()) << text;
  EXPECT_EQ(shm::Code::kInvalid, spec.status().code());
  return spec.status().message();
}

TEST(FaultSpec, ReadsARuleWithAllOfItsParts) {
  const FaultSpec spec = parsed("put@rank=1,n=3:kill");
  ASSERT_EQ(1U, spec.rules.size());
  const FaultRule& rule = spec.rules.front();

  EXPECT_EQ(OperationKind::kPut, rule.operation);
  EXPECT_EQ(1, rule.rank);
  EXPECT_EQ(3U, rule.first);
  EXPECT_EQ(3U, rule.last);
  EXPECT_EQ(Kind::kKill, rule.action.kind);
  EXPECT_EQ("put@rank=1,n=3:kill", rule.action.entry);
}

TEST(FaultSpec, ARuleWithoutMatchersMatchesEverything) {
  const FaultSpec spec = parsed("*:stall");
  ASSERT_EQ(1U, spec.rules.size());
  const FaultRule& rule = spec.rules.front();

  EXPECT_EQ(std::nullopt, rule.operation);
  EXPECT_EQ(std::nullopt, rule.rank);
  EXPECT_EQ(1U, rule.first);
  EXPECT_EQ(UINT64_MAX, rule.last);
  EXPECT_EQ(1.0, rule.probability);
  EXPECT_EQ(Kind::kStall, rule.action.kind);
}

TEST(FaultSpec, ReadsSeveralEntriesWithBlanksAndComments) {
  const FaultSpec spec = parsed(
      "# Nothing of this is real.\n"
      "  put @ rank = 1 , from = 2 : delay = 0.05 ;; any@p=0.25,seed=7:kill # why\n"
      "\r\n"
      "no-symmetric; network = 2-0, 1-2; nccl=2.31.2; out-of-memory=3 GiB\n"
      "all_reduce@rank=*:fail=6; recv:error=2; send:block");
  ASSERT_EQ(5U, spec.rules.size());

  EXPECT_EQ(2U, spec.rules[0].first);
  EXPECT_EQ(UINT64_MAX, spec.rules[0].last);
  EXPECT_EQ(std::chrono::milliseconds(50), spec.rules[0].action.delay);
  EXPECT_EQ(std::nullopt, spec.rules[1].operation);
  EXPECT_EQ(0.25, spec.rules[1].probability);
  EXPECT_EQ(7U, spec.rules[1].seed);
  EXPECT_EQ(std::nullopt, spec.rules[2].rank);
  EXPECT_EQ(Kind::kFail, spec.rules[2].action.kind);
  EXPECT_EQ(6, spec.rules[2].action.code);
  EXPECT_EQ(Kind::kError, spec.rules[3].action.kind);
  EXPECT_EQ(2, spec.rules[3].action.code);
  EXPECT_EQ(Kind::kBlock, spec.rules[4].action.kind);
  EXPECT_FALSE(spec.symmetric);
  EXPECT_EQ((std::vector<std::pair<int, int>>{{0, 2}, {1, 2}}), spec.networks);
  EXPECT_EQ("2.31.2", spec.nccl);
  EXPECT_EQ(3U << 30, spec.memory);
}

TEST(FaultSpec, ReadsWhatIsTracedAndWhatIsSetApart) {
  const FaultSpec spec = parsed("*:trace; set-apart; nccl=2.29.7");
  ASSERT_EQ(1U, spec.rules.size());

  EXPECT_EQ(Kind::kTrace, spec.rules[0].action.kind);
  EXPECT_TRUE(spec.set_apart);
  EXPECT_FALSE(parsed("put:kill").set_apart);
  EXPECT_EQ("2.29.7", spec.nccl);
}

TEST(FaultSpec, ARegistrationMayGiveNothing) {
  const FaultRule rule = parsed("window_register@n=2:null").rules.front();

  EXPECT_EQ(Kind::kNull, rule.action.kind);
  EXPECT_EQ(2U, rule.last);
}

TEST(FaultSpec, AFunctionByItsNameIsNoOperation) {
  const FaultRule rule = parsed("cudaMemcpyAsync@n=3:fail=719").rules.front();

  EXPECT_EQ("cudaMemcpyAsync", rule.function);
  EXPECT_FALSE(rule.operation);
  EXPECT_EQ(719, rule.action.code);
}

TEST(FaultSpec, NothingIsNoFault) {
  const FaultSpec spec = parsed(" \n;# only words\n");

  EXPECT_TRUE(spec.rules.empty());
  EXPECT_TRUE(spec.symmetric);
  EXPECT_EQ(std::nullopt, spec.memory);
  EXPECT_FALSE(spec.network_between(0, 1));
}

TEST(FaultSpec, EveryOperationHasItsName) {
#define WEIGHTSYNC_EACH(enumerator, name, library)     \
  EXPECT_EQ(name, name_of(OperationKind::enumerator)); \
  EXPECT_EQ(OperationKind::enumerator,                 \
            parsed(std::string(name) + ":stall").rules.front().operation);
  WEIGHTSYNC_EMULATOR_OPERATIONS(WEIGHTSYNC_EACH)
#undef WEIGHTSYNC_EACH
}

TEST(FaultSpec, ANetworkJoinsPairsInBothDirectionsAndNobodyWithItself) {
  const FaultSpec spec = parsed("network=0-2");
  const FaultSpec all = parsed("network=*");

  EXPECT_TRUE(spec.network_between(0, 2));
  EXPECT_TRUE(spec.network_between(2, 0));
  EXPECT_FALSE(spec.network_between(0, 1));
  EXPECT_FALSE(spec.network_between(2, 2));
  EXPECT_TRUE(all.network_between(5, 3));
  EXPECT_FALSE(all.network_between(5, 5));
}

TEST(FaultSpec, BytesMayHaveAUnit) {
  EXPECT_EQ(0U, parsed("out-of-memory=0").memory);
  EXPECT_EQ(4096U, parsed("out-of-memory=4096").memory);
  EXPECT_EQ(8192U, parsed("out-of-memory=8KiB").memory);
}

TEST(FaultSpec, RefusesWithTheEntryAndWhatMayBeThere) {
  const std::pair<const char*, const char*> refusals[] = {
      {"put@rank=x:kill",
       "the fault 'put@rank=x:kill': rank is 'x', but must be a number of at least 0, "
       "or *"},
      {"put@rank=-1:kill",
       "the fault 'put@rank=-1:kill': rank is '-1', but must be a number of at least "
       "0, "
       "or *"},
      {"put@n=0:kill",
       "the fault 'put@n=0:kill': n is '0', but must be a number of at least 1"},
      {"put@from=2x:kill",
       "the fault 'put@from=2x:kill': from is '2x', but must be a number of at least "
       "1"},
      {"put@p=1.5:kill",
       "the fault 'put@p=1.5:kill': p is '1.5', but must be a probability from 0 to 1"},
      {"put@p=nan:kill",
       "the fault 'put@p=nan:kill': p is 'nan', but must be a probability from 0 to 1"},
      {"put@p=0.5,seed=-3:kill",
       "the fault 'put@p=0.5,seed=-3:kill': seed is '-3', but must be a number of at "
       "least 0"},
      {"put@seed=3:kill", "the fault 'put@seed=3:kill': seed needs p"},
      {"put@n=1,from=2:kill",
       "the fault 'put@n=1,from=2:kill': n and from exclude each other"},
      {"put@n=1,n=2:kill", "the fault 'put@n=1,n=2:kill': n is given twice"},
      {"put@:kill", "the fault 'put@:kill': a matcher is '', but must be name=value"},
      {"put@count=1:kill",
       "the fault 'put@count=1:kill': the name of a matcher is 'count', but must be "
       "one "
       "of rank, n, from, p, seed"},
      {"put:explode",
       "the fault 'put:explode': the action is 'explode', but must be delay=SECONDS, "
       "stall, block, kill, null, trace, fail=CODE or error=CODE"},
      {"put:kill=9",
       "the fault 'put:kill=9': the action is 'kill=9', but must be delay=SECONDS, "
       "stall, block, kill, null, trace, fail=CODE or error=CODE"},
      {"put:null", "the fault 'put:null': null needs the operation window_register"},
      {"send:error=0",
       "the fault 'send:error=0': error is '0', but must be an ncclResult_t from 1 to "
       "8"},
      {"*:block",
       "the fault '*:block': block needs one operation: a collective, send or recv"},
      {"put:error=6",
       "the fault 'put:error=6': error needs one operation: a collective, send or "
       "recv"},
      {"put:delay=-1",
       "the fault 'put:delay=-1': delay is '-1', but must be a number of seconds from "
       "0 "
       "to 1000000"},
      {"put:fail=9",
       "the fault 'put:fail=9': fail is '9', but must be an ncclResult_t from 1 to 8"},
      {"malloc:fail=700",
       "the fault 'malloc:fail=700': fail is '700', but must be 2, "
       "cudaErrorMemoryAllocation"},
      {"cuMemMap:fail=1000",
       "the fault 'cuMemMap:fail=1000': fail is '1000', but must be a cudaError from 1 "
       "to 999"},
      {"ncclGroupEnd:fail=9",
       "the fault 'ncclGroupEnd:fail=9': fail is '9', but must be an ncclResult_t from "
       "1 to 8"},
      {"cudaMemcpyAsync:stall",
       "the fault 'cudaMemcpyAsync:stall': stall needs an operation: a function "
       "returns"},
      {"*:fail=1",
       "the fault '*:fail=1': fail needs one operation: the codes of CUDA and of NCCL "
       "differ"},
      {"network=1-1",
       "the fault 'network=1-1': a pair of network is '1-1', but must be two different "
       "ranks, such as 0-2, or *"},
      {"network=0",
       "the fault 'network=0': a pair of network is '0', but must be two different "
       "ranks, such as 0-2, or *"},
      {"out-of-memory=1.5GiB",
       "the fault 'out-of-memory=1.5GiB': out-of-memory is '1.5GiB', but must be a "
       "number of bytes, such as 4096 or 2GiB"},
      {"out-of-memory=99999999999TiB",
       "the fault 'out-of-memory=99999999999TiB': out-of-memory is '99999999999TiB', "
       "but must be a number of bytes, such as 4096 or 2GiB"},
      {"nccl=2.27",
       "the fault 'nccl=2.27': nccl is '2.27', but must be 2.29.7, 2.30.7, 2.31.2 or "
       "2.32.3"},
      {"put; kill",
       "the fault 'put': it is neither OPERATION@MATCHERS:ACTION nor one of "
       "no-symmetric, set-apart, out-of-memory=BYTES, network=PAIRS, nccl=VERSION"},
  };

  for (const auto& [text, message] : refusals) EXPECT_EQ(message, refusal(text));
}

TEST(FaultSpec, AnUnknownOperationIsToldTheKnownOnes) {
  const std::string message = refusal("allreduce:kill");

  EXPECT_EQ(0U,
            message.rfind("the fault 'allreduce:kill': the operation is 'allreduce', "
                          "but must be one of put, signal, wait, all_reduce, ",
                          0));
  EXPECT_NE(std::string::npos, message.find(", malloc, or *"));
}

class File {
 public:
  explicit File(const std::string& text) {
    path_ = ::testing::TempDir() + "weightsync-faults-XXXXXX";
    ::close(::mkstemp(path_.data()));
    std::ofstream(path_) << text;
  }
  ~File() { ::unlink(path_.c_str()); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(FaultSpec, MayStandInAFile) {
  const File file("# one\nput:stall\nno-symmetric\n");
  auto spec = read_faults("@" + file.path());
  ASSERT_TRUE(spec.ok());
  auto direct = read_faults("put:stall; no-symmetric");
  ASSERT_TRUE(direct.ok());

  EXPECT_EQ(1U, spec.value().rules.size());
  EXPECT_FALSE(spec.value().symmetric);
  EXPECT_EQ(1U, direct.value().rules.size());
}

TEST(FaultSpec, AnEmptyFileIsNoFault) {
  const File file("");
  auto spec = read_faults("@" + file.path());
  ASSERT_TRUE(spec.ok());

  EXPECT_TRUE(spec.value().rules.empty());
}

TEST(FaultSpec, AMissingFileIsNamed) {
  const auto spec = read_faults("@/nowhere/faults");
  ASSERT_FALSE(spec.ok());

  EXPECT_EQ("the file of faults '/nowhere/faults' cannot be read",
            spec.status().message());
}

}  // namespace
}  // namespace weightsync::emulator
