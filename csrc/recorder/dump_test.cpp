#include "recorder/dump.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <utility>

namespace weightsync::recorder {
namespace {

List no_frames(const Frames&) { return {}; }

const Value* find(const Value& value, const std::string& key) {
  for (const auto& [name, each] : std::get<Dict>(value.held())) {
    if (name == key) return &each;
  }
  return nullptr;
}

std::string json_at(const Value& value, std::initializer_list<const char*> keys) {
  const Value* at = &value;
  for (const char* key : keys) {
    at = find(*at, key);
    if (at == nullptr) return "missing";
  }
  return to_json(*at);
}

// A dump of one operation.
Value dump_of(Operation operation, const std::string& description = "default_pg") {
  Recorder recorder(8);
  operation.group = recorder.add_group("0", description, {4, 7}, 1);
  const State state = std::exchange(operation.state, State::kScheduled);
  const Ticket ticket = recorder.record(std::move(operation));
  if (state != State::kScheduled) recorder.finish(ticket, state);
  return describe(recorder.snapshot(), {7, "asked", "2.30.7"}, no_frames);
}

const Value& only(const Value& dump, std::initializer_list<const char*> keys) {
  const Value* at = &dump;
  for (const char* key : keys) at = find(*at, key);
  return std::get<List>(at->held()).at(0);
}

TEST(Json, WritesEveryKindOfValue) {
  const Value value = Dict{
      {"none", Value()}, {"list", List{true, 1, -2.5, "a\"\\\n"}}, {"empty", Dict{}}};

  EXPECT_EQ("{\"none\":null,\"list\":[true,1,-2.5,\"a\\\"\\\\\\u000a\"],\"empty\":{}}",
            to_json(value));
}

TEST(Pickle, IsProtocolTwo) {
  const std::string bytes = to_pickle(Dict{{"a", List{1, std::int64_t{1} << 40}}});

  const char expected[] =
      "\x80\x02}(X\x01\0\0\0a](J\x01\0\0\0\x8a\x08\0\0\0\0\0\x01\0\0eu.";
  EXPECT_EQ(std::string(expected, sizeof expected - 1), bytes);
}

TEST(Dump, DescribesACollectiveAsTorchDoes) {
  Operation operation;
  operation.name = "all_reduce";
  operation.collective = 3;
  const std::int64_t sizes[] = {2, 5};
  operation.add(sizes, 2, "Float", false);
  operation.add(sizes, 2, "Float", true);
  const Value dump = dump_of(operation);
  const Value& entry = only(dump, {"entries"});

  EXPECT_EQ("\"2.10\"", json_at(dump, {"version"}));
  EXPECT_EQ("{\"name\":\"0\",\"desc\":\"default_pg\",\"ranks\":\"[4, 7]\"}",
            json_at(dump, {"pg_config", "0"}));
  EXPECT_EQ("\"nccl:all_reduce\"", json_at(entry, {"profiling_name"}));
  EXPECT_EQ("[\"0\",\"default_pg\"]", json_at(entry, {"process_group"}));
  EXPECT_EQ("3", json_at(entry, {"collective_seq_id"}));
  EXPECT_EQ("[[2,5]]", json_at(entry, {"input_sizes"}));
  EXPECT_EQ("[\"Float\"]", json_at(entry, {"output_dtypes"}));
  EXPECT_EQ("\"scheduled\"", json_at(entry, {"state"}));
  EXPECT_EQ("null", json_at(entry, {"time_discovered_completed_ns"}));
  EXPECT_EQ("3", json_at(dump, {"pg_status", "0", "last_enqueued_collective"}));
}

TEST(Dump, NamesBothEndsOfASend) {
  Operation operation;
  operation.kind = Kind::kPointToPoint;
  operation.name = "send";
  operation.peer = 0;
  const Value sent = dump_of(operation);
  operation.name = "recv";
  const Value received = dump_of(operation);

  EXPECT_EQ("\"nccl:send 1->0\"", json_at(only(sent, {"entries"}), {"profiling_name"}));
  EXPECT_EQ("\"nccl:recv 1<-0\"",
            json_at(only(received, {"entries"}), {"profiling_name"}));
}

TEST(Dump, KeepsOneSidedCallsFromTorch) {
  Operation operation;
  operation.kind = Kind::kOneSided;
  operation.name = "put";
  operation.bytes = 64;
  const Value dump = dump_of(operation);

  EXPECT_EQ("[]", json_at(dump, {"entries"}));
  EXPECT_EQ("64", json_at(only(dump, {"weightsync", "operations"}), {"bytes"}));
  EXPECT_EQ("7", json_at(dump, {"weightsync", "rank"}));
}

TEST(Dump, AFailedOperationIsNotCompleted) {
  Operation operation;
  operation.name = "barrier";
  operation.state = State::kFailed;
  const Value dump = dump_of(operation);
  const Value& entry = only(dump, {"entries"});

  EXPECT_EQ("\"scheduled\"", json_at(entry, {"state"}));
  EXPECT_EQ("true", json_at(entry, {"retired"}));
  EXPECT_EQ("null", json_at(entry, {"time_discovered_completed_ns"}));
}

TEST(Files, AreWrittenIntoFoldersThatAreMade) {
  char made[] = "/tmp/weightsync-dump-XXXXXX";
  ASSERT_NE(nullptr, ::mkdtemp(made));
  const std::string folder(made);
  const Files files = files_of(folder + "/deep/trace_", 12);
  const shm::Status written = write(files, Dict{{"a", 1}});
  std::stringstream json;
  json << std::ifstream(files.json).rdbuf();
  struct stat status = {};
  const int found = ::stat(files.pickle.c_str(), &status);
  std::filesystem::remove_all(folder);

  EXPECT_TRUE(written.ok()) << written.message();
  EXPECT_EQ(folder + "/deep/trace_12", files.pickle);
  EXPECT_EQ(folder + "/deep/trace_json/12.json", files.json);
  EXPECT_EQ("{\"a\":1}", json.str());
  EXPECT_EQ(0, found);
  EXPECT_EQ(0600u, status.st_mode & 0777u);
}

TEST(Files, ThatCannotBeWrittenAreAnError) {
  const shm::Status written = write(files_of("/dev/null/trace_", 0), Dict{});

  EXPECT_FALSE(written.ok());
  EXPECT_NE(std::string::npos, written.message().find("/dev/null"));
}

}  // namespace
}  // namespace weightsync::recorder
