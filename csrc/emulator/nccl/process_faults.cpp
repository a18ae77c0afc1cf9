#include "emulator/nccl/process_faults.h"

#include <unistd.h>

#include <cstdlib>

#include "emulator/core.h"

namespace weightsync::emulator::nccl {
namespace {

constexpr int kBadInput = 2;

Faults* read_or_exit() {
  shm::Result<FaultSpec> spec = faults_of_environment();
  if (!spec.ok()) {
    complain(spec.status().message());
    ::_exit(kBadInput);
  }
  // Never destroyed: operations may still run while the process exits.
  auto* faults = new Faults(spec.take(), rank_of_environment());
  if (faults->spec().memory || !faults->spec().rules.empty()) {
    set_allocation_filter([faults](int, std::size_t used, std::size_t nbytes) {
      return allows(*faults, used, nbytes);
    });
  }
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
