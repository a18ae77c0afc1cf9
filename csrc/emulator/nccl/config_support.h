// What tests of communicators share: configs, and polling.
#pragma once

#include <chrono>
#include <thread>

#include "emulator/nccl/symbols.h"

namespace weightsync::emulator::nccl {

// NCCL_CONFIG_INITIALIZER.
inline ncclConfig_t undefined_config() {
  const int none = kNcclUndefInt;
  return {sizeof(ncclConfig_t),
          kNcclApiMagic,
          kNcclVersion,
          none,
          none,
          none,
          none,
          nullptr,
          none,
          none,
          nullptr,
          none,
          none,
          none,
          none,
          none,
          none,
          none,
          none,
          none,
          none};
}

inline ncclConfig_t nonblocking_config() {
  ncclConfig_t config = undefined_config();
  config.blocking = 0;
  return config;
}

// Polls until the communicator is no longer in progress; what it is then.
inline ncclResult_t poll(ncclComm_t communicator) {
  ncclResult_t state = ncclInProgress;
  for (int tries = 0; tries < 20000; ++tries) {
    const ncclResult_t asked = ncclCommGetAsyncError(communicator, &state);
    if (asked != ncclSuccess) return asked;
    if (state != ncclInProgress) return state;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return state;
}

}  // namespace weightsync::emulator::nccl
