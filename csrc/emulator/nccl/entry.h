// How a C function of the library gets to the communicator it was given.
#pragma once

#include <functional>
#include <memory>

#include "emulator/nccl/comm.h"
#include "emulator/nccl/group.h"
#include "emulator/nccl/outcome.h"

namespace weightsync::emulator::nccl {

using CommunicatorPtr = std::shared_ptr<Communicator>;
using OnCommunicator = std::function<Outcome(const CommunicatorPtr&)>;

inline Outcome dead_handle(ncclComm_t comm) {
  return invalid_argument(comm == nullptr
                              ? "the communicator is NULL"
                              : "this is no communicator, or no longer one");
}

inline Outcome on_live(ncclComm_t comm, const OnCommunicator& body) {
  const CommunicatorPtr communicator = Communicator::find(comm);
  return communicator ? body(communicator) : dead_handle(comm);
}

// call() and call_alone() for a function that has a communicator; 4 without.
inline ncclResult_t call_on(const CallSite& site, ncclComm_t comm,
                            const OnCommunicator& body,
                            Progress progress = Progress::kInProgress) {
  return call(site, [&] { return on_live(comm, body); }, progress);
}

inline ncclResult_t call_alone_on(const CallSite& site, ncclComm_t comm,
                                  const OnCommunicator& body) {
  return call_alone(site, [&] { return on_live(comm, body); });
}

// The same for functions to which NULL is nothing to do (destroy and its like).
inline ncclResult_t call_on_any(const CallSite& site, ncclComm_t comm,
                                const OnCommunicator& body) {
  return comm == nullptr ? ncclSuccess : call_on(site, comm, body);
}

}  // namespace weightsync::emulator::nccl
