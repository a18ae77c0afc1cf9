// The frame of every API call: its group, its failure, and who called.
#include <dlfcn.h>

#include <cstdint>
#include <mutex>
#include <string>

#include "emulator/core.h"
#include "emulator/nccl/environment.h"
#include "emulator/nccl/group.h"
#include "emulator/nccl/group_state.h"

namespace weightsync::emulator::nccl {
namespace {

thread_local CallSite call_of_thread;

// The text of ncclGetLastError: one for the process, as in NCCL.
struct LastError {
  std::mutex mutex;
  std::string text;
};

LastError& last() {
  static LastError* const instance = new LastError;
  return *instance;
}

bool warnings_wanted() {
  const std::string level = environment("NCCL_DEBUG");
  return !level.empty() && level != "VERSION";
}

Outcome run(const CallSite& site, const std::function<Outcome()>& body) {
  count_call(site.function);
  const int code = filtered_code(site.function);
  if (code == 0) return body();
  return {static_cast<ncclResult_t>(code), "as a fault asks"};
}

}  // namespace

CallSite current_call() { return call_of_thread; }

CallScope::CallScope(const CallSite& site) : before_(call_of_thread) {
  call_of_thread = site;
}

CallScope::~CallScope() { call_of_thread = before_; }

std::string describe_address(const void* address) {
  Dl_info info{};
  if (::dladdr(address, &info) == 0 || info.dli_fname == nullptr) return "";
  if (info.dli_sname != nullptr) return info.dli_sname;
  const std::string path = info.dli_fname;
  const auto offset = reinterpret_cast<std::uintptr_t>(address) -
                      reinterpret_cast<std::uintptr_t>(info.dli_fbase);
  char number[24];
  std::snprintf(number, sizeof number, "+0x%llx",
                static_cast<unsigned long long>(offset));
  return path.substr(path.find_last_of('/') + 1) + number;
}

void warn(const Outcome& outcome) {
  const std::string text =
      std::string(call_of_thread.function) + " on the emulator: " + outcome.message();
  if (warnings_wanted()) complain(text);
  LastError& error = last();
  const std::lock_guard lock(error.mutex);
  error.text = text;
}

const char* last_error() {
  // The caller's own copy: another thread may fail meanwhile.
  thread_local std::string copy;
  LastError& error = last();
  const std::lock_guard lock(error.mutex);
  copy = error.text;
  return copy.c_str();
}

ncclResult_t call_bare(const CallSite& site, const std::function<Outcome()>& body) {
  const CallScope scope(site);
  const Outcome outcome = run(site, body);
  if (!outcome.ok() && outcome.code() != ncclInProgress) warn(outcome);
  return outcome.code();
}

ncclResult_t call_alone(const CallSite& site, const std::function<Outcome()>& body) {
  const CallScope scope(site);
  const Outcome outcome = run(site, body);
  if (!outcome.ok()) {
    warn(outcome);
    record_failure(outcome);
  }
  return outcome.code();
}

ncclResult_t call(const CallSite& site, const std::function<Outcome()>& body,
                  Progress progress) {
  const CallScope scope(site);
  (void)group_start().ok();
  const Outcome outcome = run(site, body);
  if (!outcome.ok()) record_failure(outcome);
  const Outcome ended = group_end();
  const Outcome& result = outcome.ok() ? ended : outcome;
  if (result.code() == ncclInProgress) {
    return progress == Progress::kInProgress ? ncclInProgress : ncclSuccess;
  }
  if (!result.ok()) warn(result);
  return result.code();
}

}  // namespace weightsync::emulator::nccl
