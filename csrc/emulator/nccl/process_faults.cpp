#include "emulator/nccl/process_faults.h"

#include <unistd.h>

#include <cstdlib>
#include <string>

#include "emulator/core.h"

namespace weightsync::emulator::nccl {
namespace {

constexpr int kBadInput = 2;

// Lets allocations and calls ask, which otherwise cost nothing.
void heed(Faults& faults) {
  set_allocation_filter([&faults](int, std::size_t used, std::size_t nbytes) {
    return allows(faults, used, nbytes);
  });
  set_call_filter(
      [&faults](const char* function) { return code_of_call(faults, function); });
}

bool has_settings(const FaultSpec& spec) {
  return !spec.symmetric || spec.set_apart || spec.memory || spec.network_everywhere ||
         !spec.networks.empty() || !spec.nccl.empty();
}

Faults* read_or_exit() {
  shm::Result<FaultSpec> spec = faults_of_environment();
  if (!spec.ok()) {
    complain(spec.status().message());
    ::_exit(kBadInput);
  }
  // Never destroyed: operations may still run while the process exits.
  auto* faults = new Faults(spec.take(), rank_of_environment());
  if (faults->spec().memory || !faults->spec().rules.empty()) heed(*faults);
  return faults;
}

// Early enough for the first allocation. Without the variable nothing is made, neither
// here nor, as long as it does not use them, in what is forked from here.
__attribute__((constructor)) void read_at_load() {
  const char* value = std::getenv("WEIGHTSYNC_EMULATOR_FAULTS");
  if (value != nullptr && *value != '\0') process_faults();
}

}  // namespace

Faults& process_faults() {
  static Faults* const faults = read_or_exit();
  return *faults;
}

}  // namespace weightsync::emulator::nccl

extern "C" __attribute__((visibility("default"))) void
weightsync_emulator_read_faults() {
  weightsync::emulator::nccl::process_faults();
}

extern "C" __attribute__((visibility("default"))) const char*
weightsync_emulator_inject_faults(const char* text) {
  using namespace weightsync::emulator;  // NOLINT: this function is the edge
  thread_local std::string refusal;
  refusal.clear();
  auto spec = parse_faults(text);
  if (!spec.ok()) refusal = spec.status().message();
  if (spec.ok() && nccl::has_settings(spec.value())) {
    refusal = "what a process runs on is set before it begins, and not injected";
  }
  if (!refusal.empty()) return refusal.c_str();
  Faults& faults = nccl::process_faults();
  faults.inject(spec.take().rules);
  nccl::heed(faults);
  return nullptr;
}
