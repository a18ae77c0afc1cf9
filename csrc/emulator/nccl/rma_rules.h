// What ncclPutSignal, ncclSignal and ncclWaitSignal refuse, and in which order. Pure:
// facts in, decision out. The last row of a put (its offset) is looked at only at
// launch, see rma_plan.h.
#pragma once

#include <cstddef>

#include "emulator/nccl/rules.h"

namespace weightsync::emulator::nccl {

enum class HandleState { kNull, kUnknown, kUsable, kNotPutable };
enum class SourceState { kNull, kOutside, kNotSymmetric, kUsable, kNotPutable };

// What each of the three calls is checked for. A signal is a put without data: it looks
// at no window.
struct RmaCall {
  bool comm_valid = true;
  bool revoked = false;
  ncclResult_t readiness = ncclSuccess;  // of the communicator
  bool host_rma_support = true;          // also false where numRmaCtx is 0
  bool driver_recent = true;             // 12.5 or newer
  int ranks = 1;

  // How many contexts and signals there are: 1 each before 2.31.
  int contexts = 1;
  int signals = 1;
  // From 2.31.2 on, the first window registration makes the signal memory; before that
  // version the first operation does.
  bool signals_exist = true;
};

struct PutCall {
  RmaCall common;
  bool is_put = true;  // false: ncclSignal
  int peer = 0;
  int datatype = 0;
  int ctx = 0;
  int sig_idx = 0;
  unsigned int flags = 0;
  HandleState window = HandleState::kUsable;
  SourceState source = SourceState::kUsable;
};

Decision decide_put(const PutCall& call);

struct WaitCall {
  RmaCall common;
  int descriptors = 0;
  const ncclWaitSignalDesc_t* list = nullptr;
};

Decision decide_wait(const WaitCall& call);

}  // namespace weightsync::emulator::nccl
