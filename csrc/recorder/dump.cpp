#include "recorder/dump.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <map>
#include <system_error>
#include <utility>

namespace weightsync::recorder {
namespace {

using shm::Status;

constexpr const char* kTorchFormat = "2.10";
constexpr int kOwnFormat = 1;

using Groups = std::map<std::uint64_t, const Group*>;

const char* text_of(State state) {
  switch (state) {
    case State::kStarted:
      return "started";
    case State::kCompleted:
      return "completed";
    case State::kFailed:  // To torch: given up by the watchdog, not completed.
    case State::kScheduled:
      break;
  }
  return "scheduled";
}

std::string text_of(const std::vector<std::int64_t>& ranks) {
  std::string text = "[";
  const char* between = "";
  for (const std::int64_t rank : ranks) {
    text += between + std::to_string(rank);
    between = ", ";
  }
  return text + "]";
}

Value nanoseconds_or_none(std::int64_t time) {
  return time == 0 ? Value() : Value(time);
}

// "nccl:", because torch 2.14 asserts on any name that it does not know.
std::string profiling_name(const Operation& operation, const Group& group) {
  std::string name = std::string("nccl:") + operation.name;
  if (operation.kind != Kind::kPointToPoint || operation.is_batch) return name;
  const bool sends = std::string(operation.name) == "send";
  return name + " " + std::to_string(group.rank) + (sends ? "->" : "<-") +
         std::to_string(operation.peer);
}

struct Shapes {
  List sizes;
  List dtypes;
};

Shapes shapes_of(const Operation& operation, bool outputs) {
  Shapes shapes;
  auto size = operation.sizes.begin();
  for (const Tensor& tensor : operation.tensors) {
    const auto end = size + tensor.dimensions;
    if (tensor.is_output == outputs) {
      shapes.sizes.emplace_back(List(size, end));
      shapes.dtypes.emplace_back(tensor.dtype);
    }
    size = end;
  }
  return shapes;
}

void describe_times(const Operation& operation, Dict& entry) {
  const bool failed = operation.state == State::kFailed;
  entry.emplace_back("time_created_ns", operation.created_ns);
  entry.emplace_back("time_discovered_started_ns",
                     nanoseconds_or_none(operation.started_ns));
  entry.emplace_back("time_discovered_completed_ns",
                     failed ? Value() : nanoseconds_or_none(operation.finished_ns));
  entry.emplace_back("time_failed_ns", failed ? Value(operation.finished_ns) : Value());
  entry.emplace_back("timeout_ms", operation.timeout_ms);
}

Dict describe_common(const Operation& operation, const Group& group) {
  const auto id = static_cast<std::int64_t>(operation.id);
  Dict entry;
  entry.emplace_back("record_id", id);
  entry.emplace_back("pg_id", static_cast<std::int64_t>(group.id));
  entry.emplace_back("process_group", List{group.name, group.description});
  entry.emplace_back("op_id", operation.call);
  entry.emplace_back("state", text_of(operation.state));
  entry.emplace_back("retired", operation.finished_ns != 0);
  entry.emplace_back("thread_id", std::to_string(operation.thread));
  entry.emplace_back("thread_name", "");
  entry.emplace_back("peer", operation.peer < 0 ? Value() : Value(operation.peer));
  entry.emplace_back("with_peer", operation.with_peer);
  describe_times(operation, entry);
  return entry;
}

Value describe_entry(const Operation& operation, const Group& group,
                     const ReadFrames& read_frames) {
  Dict entry = describe_common(operation, group);
  entry.emplace_back("collective_seq_id", operation.collective);
  entry.emplace_back("p2p_seq_id", operation.point_to_point);
  entry.emplace_back("is_p2p", operation.kind == Kind::kPointToPoint);
  entry.emplace_back("profiling_name", profiling_name(operation, group));
  Shapes inputs = shapes_of(operation, false);
  Shapes outputs = shapes_of(operation, true);
  entry.emplace_back("input_sizes", std::move(inputs.sizes));
  entry.emplace_back("input_dtypes", std::move(inputs.dtypes));
  entry.emplace_back("output_sizes", std::move(outputs.sizes));
  entry.emplace_back("output_dtypes", std::move(outputs.dtypes));
  entry.emplace_back("frames",
                     operation.frames ? read_frames(operation.frames) : List{});
  return entry;
}

Value describe_own(const Operation& operation, const Group& group,
                   const ReadFrames& read_frames) {
  Dict entry = describe_common(operation, group);
  entry.emplace_back("name", operation.name);
  entry.emplace_back("offset", operation.offset);
  entry.emplace_back("bytes", operation.bytes);
  entry.emplace_back("frames",
                     operation.frames ? read_frames(operation.frames) : List{});
  return entry;
}

using DescribeOne = Value (*)(const Operation&, const Group&, const ReadFrames&);

List describe_all(const std::vector<Operation>& operations, const Groups& groups,
                  const ReadFrames& read_frames, DescribeOne describe_one) {
  List list;
  for (const Operation& operation : operations) {
    const auto group = groups.find(operation.group->id);
    if (group == groups.end()) continue;
    list.push_back(describe_one(operation, *group->second, read_frames));
  }
  return list;
}

Dict describe_config(const Groups& groups) {
  std::map<std::string, Value> config;
  for (const auto& [id, group] : groups) {
    config[group->name] = Dict{{"name", group->name},
                               {"desc", group->description},
                               {"ranks", text_of(group->ranks)}};
  }
  return {config.begin(), config.end()};
}

Dict describe_status(const Groups& groups) {
  Dict status;
  for (const auto& [id, group] : groups) {
    status.emplace_back(std::to_string(id),
                        Dict{{"last_enqueued_collective", group->enqueued},
                             {"last_started_collective", group->completed},
                             {"last_completed_collective", group->completed}});
  }
  return status;
}

std::int64_t now_ns() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

std::string host_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "";
}

List describe_groups(const Groups& groups) {
  List list;
  for (const auto& [id, group] : groups) {
    list.emplace_back(Dict{{"id", static_cast<std::int64_t>(id)},
                           {"name", group->name},
                           {"description", group->description},
                           {"ranks", List(group->ranks.begin(), group->ranks.end())},
                           {"rank", group->rank}});
  }
  return list;
}

Status write_file(const std::string& path, const std::string& bytes) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (file < 0) return shm::system_error("write " + path, errno);
  std::size_t written = 0;
  while (written < bytes.size()) {
    const ssize_t some = ::write(file, bytes.data() + written, bytes.size() - written);
    if (some < 0 && errno == EINTR) continue;
    if (some < 0) {
      const int error = errno;
      ::close(file);
      return shm::system_error("write " + path, error);
    }
    written += static_cast<std::size_t>(some);
  }
  if (::close(file) != 0) return shm::system_error("write " + path, errno);
  return {};
}

Status make_folder_of(const std::string& path) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::error_code error;
  if (!folder.empty()) std::filesystem::create_directories(folder, error);
  if (error)
    return shm::system_error("make the folder " + folder.string(), error.value());
  return {};
}

}  // namespace

Value describe(const Snapshot& snapshot, const Origin& origin,
               const ReadFrames& read_frames) {
  Groups groups;
  for (const Group& group : snapshot.groups) groups[group.id] = &group;
  Dict own{
      {"format", kOwnFormat},
      {"rank", origin.rank},
      {"process", static_cast<std::int64_t>(::getpid())},
      {"host", host_name()},
      {"time_ns", now_ns()},
      {"reason", origin.reason},
      {"capacity", static_cast<std::int64_t>(snapshot.capacity)},
      {"groups", describe_groups(groups)},
      {"operations", describe_all(snapshot.others, groups, read_frames, describe_own)}};
  return Dict{{"version", kTorchFormat},
              {"comm_lib_version", origin.library},
              {"pg_config", describe_config(groups)},
              {"pg_status", describe_status(groups)},
              {"entries",
               describe_all(snapshot.exchanges, groups, read_frames, describe_entry)},
              {"weightsync", std::move(own)}};
}

Files files_of(const std::string& prefix, std::int64_t rank) {
  const std::string number = std::to_string(rank);
  return {prefix + number, prefix + "json/" + number + ".json"};
}

Status write(const Files& files, const Value& dump) {
  Status made = make_folder_of(files.json);
  if (!made.ok()) return made;
  Status written = write_file(files.json, to_json(dump));
  if (!written.ok()) return written;
  return write_file(files.pickle, to_pickle(dump));
}

}  // namespace weightsync::recorder
