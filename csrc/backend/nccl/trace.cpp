#include "backend/nccl/trace.h"

#include <c10/util/Logging.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "nccl/aside.h"
#include "recorder/request.h"

namespace weightsync::trace {
namespace {

using recorder::Dict;
using recorder::Files;
using recorder::Frames;
using recorder::List;
using recorder::Operation;
using recorder::Recorder;
using recorder::Snapshot;
using shm::Code;
using shm::Result;
using shm::Status;

constexpr std::size_t kCapacity = 2000;
constexpr std::size_t kMostCapacity = 1'000'000;
constexpr std::chrono::seconds kWrite{10};
constexpr std::chrono::seconds kReadFrames{5};

// The first of these variables that is set.
std::string variable(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    const char* const value = std::getenv(name);
    if (value != nullptr && *value != '\0') return value;
  }
  return "";
}

std::size_t capacity() {
  const std::string text = variable({"WEIGHTSYNC_TRACE_BUFFER", "TORCH_FR_BUFFER_SIZE",
                                     "TORCH_NCCL_TRACE_BUFFER_SIZE"});
  if (text.empty()) return kCapacity;
  char* end = nullptr;
  const unsigned long long asked = std::strtoull(text.c_str(), &end, 10);
  if (*end == '\0' && asked <= kMostCapacity) return asked;
  LOG(WARNING) << "weightsync-nccl2: the flight recorder cannot keep '" << text
               << "' operations, and keeps " << kCapacity;
  return kCapacity;
}

struct Looker {
  std::weak_ptr<void> owner;
  std::function<void()> look;
};

struct Settings {
  std::mutex mutex;
  std::string prefix;           // guarded by mutex
  std::int64_t rank = 0;        // guarded by mutex
  std::string library;          // guarded by mutex
  std::vector<Looker> lookers;  // guarded by mutex
  std::mutex writing;           // one dump after the other
};

// Never destroyed: a watchdog or the thread of the signal may be about to dump.
Settings& settings() {
  static auto* const made = new Settings();
  return *made;
}

// What is read of Python in a thread that may have to be left behind.
struct Reading {
  std::vector<Frames> frames;
  std::map<const void*, List> read;
};

List as_list(const torch::SymbolizedTracebacks& read,
             const std::vector<std::uint64_t>& traceback) {
  List list;
  for (const std::uint64_t index : traceback) {
    const auto& frame = read.all_frames.at(index);
    list.emplace_back(Dict{{"name", frame.funcname},
                           {"filename", frame.filename},
                           {"line", static_cast<std::int64_t>(frame.lineno)}});
  }
  return list;
}

Status read_all(Reading& reading) {
  try {
    std::vector<torch::CapturedTraceback*> asked;
    for (const Frames& each : reading.frames) {
      asked.push_back(static_cast<torch::CapturedTraceback*>(
          const_cast<void*>(each.get())));  // symbolize() takes no constant ones
    }
    const torch::SymbolizedTracebacks read = torch::symbolize(asked);
    for (std::size_t each = 0; each < asked.size(); ++each) {
      reading.read[asked[each]] = as_list(read, read.tracebacks.at(each));
    }
  } catch (const std::exception& error) {
    return {Code::kSystem, error.what()};
  }
  return {};
}

// Takes the GIL, which a thread that is stuck may hold: then there are no frames.
std::map<const void*, List> read_frames(const Snapshot& snapshot) {
  const auto reading = std::make_shared<Reading>();
  for (const auto* operations : {&snapshot.exchanges, &snapshot.others}) {
    for (const Operation& each : *operations) {
      if (each.frames) reading->frames.push_back(each.frames);
    }
  }
  if (reading->frames.empty()) return {};
  const Status status =
      nccl::run_aside("reading where operations were called", shm::after(kReadFrames),
                      [reading] { return read_all(*reading); });
  if (!status.ok()) return {};
  return std::move(reading->read);
}

// Without that, what is over would be written as pending if nobody asked yet.
void look_at_all() {
  std::vector<Looker> lookers;
  {
    const std::lock_guard<std::mutex> lock(settings().mutex);
    lookers = settings().lookers;
  }
  for (const Looker& each : lookers) {
    if (const auto alive = each.owner.lock()) each.look();
  }
}

recorder::Value describe(const std::string& reason) {
  look_at_all();
  recorder::Origin origin;
  origin.reason = reason;
  {
    const std::lock_guard<std::mutex> lock(settings().mutex);
    origin.rank = settings().rank;
    origin.library = settings().library;
  }
  const Snapshot snapshot = trace::recorder().snapshot();
  const auto read = read_frames(snapshot);
  return recorder::describe(snapshot, origin, [&read](const Frames& frames) {
    const auto found = read.find(frames.get());
    return found == read.end() ? List{} : found->second;
  });
}

std::string prefix_in_use() {
  const std::lock_guard<std::mutex> lock(settings().mutex);
  return settings().prefix;
}

void dump_asked_for() {
  auto dumped = dump("", "asked for by a signal");
  if (dumped.ok()) {
    LOG(ERROR) << "weightsync-nccl2: a signal asked for the last operations, which "
                  "are in "
               << dumped.value().json;
  } else {
    LOG(ERROR) << "weightsync-nccl2: " << dumped.status().message();
  }
}

}  // namespace

Recorder& recorder() {
  static auto* const made = new Recorder(capacity());
  return *made;
}

void use_rank(std::int64_t rank) {
  const std::lock_guard<std::mutex> lock(settings().mutex);
  settings().rank = rank;
}

void use_prefix(const std::string& prefix) {
  const std::string found =
      prefix.empty() ? variable({"WEIGHTSYNC_TRACE_FILE", "TORCH_FR_DUMP_TEMP_FILE",
                                 "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"})
                     : prefix;
  if (found.empty()) return;
  const std::lock_guard<std::mutex> lock(settings().mutex);
  settings().prefix = found;
}

void use_library(const std::string& version) {
  const std::lock_guard<std::mutex> lock(settings().mutex);
  settings().library = version;
}

void look_before_dumps(std::weak_ptr<void> owner, std::function<void()> look) {
  const std::lock_guard<std::mutex> lock(settings().mutex);
  auto& lookers = settings().lookers;
  lookers.erase(std::remove_if(lookers.begin(), lookers.end(),
                               [](const Looker& each) { return each.owner.expired(); }),
                lookers.end());
  lookers.push_back({std::move(owner), std::move(look)});
}

void listen() {
  static std::once_flag once;
  std::call_once(once, [] {
    const std::string name = variable({"WEIGHTSYNC_TRACE_SIGNAL"});
    if (name.empty()) return;
    const int number = recorder::signal_number(name);
    const Status status =
        number == 0 ? Status{Code::kInvalid, "there is no signal '" + name + "'"}
                    : recorder::dump_on_signal(number, dump_asked_for);
    if (!status.ok()) {
      LOG(ERROR) << "weightsync-nccl2: WEIGHTSYNC_TRACE_SIGNAL: " << status.message();
    }
  });
}

Frames frames() {
  static const bool wanted = variable({"WEIGHTSYNC_TRACE_FRAMES"}) == "1";
  if (!wanted) return nullptr;
  return torch::CapturedTraceback::gather(true, false, false);
}

std::string json(const std::string& reason) { return to_json(describe(reason)); }

Result<Files> dump(const std::string& prefix, const std::string& reason) {
  const std::string used = prefix.empty() ? prefix_in_use() : prefix;
  if (used.empty()) {
    return Status{Code::kInvalid,
                  "a trace needs the beginning of the names of its files: set "
                  "WEIGHTSYNC_TRACE_FILE"};
  }
  const recorder::Value described = describe(reason);
  std::int64_t rank = 0;
  {
    const std::lock_guard<std::mutex> lock(settings().mutex);
    rank = settings().rank;
  }
  Files files = recorder::files_of(used, rank);
  const std::lock_guard<std::mutex> one(settings().writing);
  Status written = recorder::write(files, described);
  if (!written.ok()) return written;
  return files;
}

void dump_after(const Status& why) {
  if (why.code() == Code::kClosed || why.code() == Code::kCancelled) return;
  if (prefix_in_use().empty() || !recorder().enabled()) return;
  const auto files = std::make_shared<Files>();
  const Status status =
      nccl::run_aside("writing the last operations", shm::after(kWrite),
                      [files, reason = why.message()] {
                        auto dumped = dump("", reason);
                        if (!dumped.ok()) return dumped.status();
                        *files = dumped.take();
                        return Status{};
                      });
  if (status.ok()) {
    LOG(ERROR) << "weightsync-nccl2: the last operations are in " << files->json
               << "; 'weightsync trace' says what they wait for";
  } else {
    LOG(ERROR) << "weightsync-nccl2: " << status.message();
  }
}

}  // namespace weightsync::trace
