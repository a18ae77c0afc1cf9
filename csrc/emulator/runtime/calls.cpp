// The calls of a process: how often it called each function of CUDA and of NCCL, by
// name, so that a program can show what it does not do; and which of them fail.
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "emulator/core.h"
#include "shm/annotations.h"

namespace weightsync::emulator {
namespace {

struct Calls {
  shm::Mutex mu;
  std::shared_ptr<const CallFilter> filter WEIGHTSYNC_GUARDED_BY(mu);
  std::map<std::string, std::uint64_t, std::less<>> counts WEIGHTSYNC_GUARDED_BY(mu);
};

Calls& calls() {
  static Calls* const instance = new Calls;
  return *instance;
}

}  // namespace

void set_call_filter(CallFilter filter) {
  Calls& known = calls();
  auto made = filter ? std::make_shared<const CallFilter>(std::move(filter)) : nullptr;
  const shm::MutexLock lock(known.mu);
  known.filter = std::move(made);
}

int filtered_code(const char* function) {
  std::shared_ptr<const CallFilter> filter;
  {
    Calls& known = calls();
    const shm::MutexLock lock(known.mu);
    filter = known.filter;
  }
  return filter == nullptr ? 0 : (*filter)(function);
}

void count_call(const char* function) {
  Calls& known = calls();
  const shm::MutexLock lock(known.mu);
  const auto found = known.counts.find(std::string_view(function));
  if (found != known.counts.end()) {
    ++found->second;
  } else {
    known.counts.emplace(function, 1);
  }
}

std::string counted_calls() {
  Calls& known = calls();
  const shm::MutexLock lock(known.mu);
  std::string text;
  for (const auto& [function, count] : known.counts) {
    text += function + " " + std::to_string(count) + "\n";
  }
  return text;
}

}  // namespace weightsync::emulator

// For Python: the text lasts until the next call of this thread.
extern "C" __attribute__((visibility("default"))) const char*
weightsync_emulator_calls() {
  thread_local std::string text;
  text = weightsync::emulator::counted_calls();
  return text.c_str();
}
