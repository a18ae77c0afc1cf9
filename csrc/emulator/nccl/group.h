// Groups: what a thread collects between ncclGroupStart and ncclGroupEnd, and how the
// outermost end carries it out (section 4.8 of the contract).
//
// Every call of the API runs inside a group: its own, or the one the thread has open.
// api.cpp sees to that, so operations only add what they want done. A failing call
// makes the outermost end return its code and drop everything.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "emulator/nccl/operation.h"
#include "emulator/nccl/outcome.h"
#include "nccl/abi.h"

namespace weightsync::emulator::nccl {

class Communicator;

// What the host does at the outermost end before any operation is launched, in this
// order: all kCreate, all kRegister, then prepare() and launch() of the operations.
enum class Step : std::uint8_t { kCreate, kRegister, kTeardown };

// Work of one communicator on the host, which may block on its peers. The steps of one
// communicator run in the order they were added, those of different communicators at
// the same time (on threads of their own if there are several: one thread may drive
// all ranks).
struct HostStep {
  Step step = Step::kCreate;
  std::string what;  // "ncclCommWindowRegister of 4096 bytes"
  std::function<Outcome()> run;
  // Runs if the group is dropped before, or because, something failed; may be empty.
  std::function<void()> undo;
  bool always_blocking = false;  // destroy and abort
};

// To the calling thread's open group. Both fail with 4 if the group mixes blocking and
// nonblocking communicators (`undo` has run then), add_operation with 1 if the stream
// is not one of the communicator's device. Called only from inside an API call.
Outcome add_step(const std::shared_ptr<Communicator>& communicator, HostStep step);
Outcome add_operation(const std::shared_ptr<Communicator>& communicator,
                      std::shared_ptr<Operation> operation, cudaStream_t stream);

// ncclGroupStart, ncclGroupEnd, ncclGroupSimulateEnd.
Outcome group_start();
Outcome group_end();
Outcome group_simulate_end(ncclSimInfo_t* info);

// What a call on a nonblocking communicator returns when its work goes on behind it.
enum class Progress : std::uint8_t { kInProgress, kSuccess };

// One call of the API: opens an implicit group, runs `body`, records its failure and
// closes the group. What the C function returns.
ncclResult_t call(const CallSite& site, const std::function<Outcome()>& body,
                  Progress progress = Progress::kInProgress);
// The same without a group, for calls that never join one (getters, deregister).
ncclResult_t call_alone(const CallSite& site, const std::function<Outcome()>& body);

// The same for the functions that open and close groups.
ncclResult_t call_bare(const CallSite& site, const std::function<Outcome()>& body);

// Says the failure to ncclGetLastError, and on stderr if NCCL_DEBUG asks for warnings.
void warn(const Outcome& outcome);
const char* last_error();

// The API call that the calling thread is in, for describe() and diagnosis.
CallSite current_call();
// For a thread that works for a call of another thread.
class CallScope {
 public:
  explicit CallScope(const CallSite& site);
  ~CallScope();
  CallScope(const CallScope&) = delete;
  CallScope& operator=(const CallScope&) = delete;

 private:
  const CallSite before_;
};
// "libtorch_cuda.so+0x12ab34", or the symbol's name where there is one.
std::string describe_address(const void* address);

}  // namespace weightsync::emulator::nccl
