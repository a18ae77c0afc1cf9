// aside: a call that may never return, on a thread of its own and with a deadline.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "shm/futex.h"
#include "shm/status.h"

namespace weightsync::nccl {

// Asked some ten times a second while something is waited for, by the thread that
// waits: an error ends the waiting.
using Interrupted = std::function<shm::Status()>;

// Runs `work` on a new thread and waits for it until the deadline. kTimedOut if it
// still runs then: it goes on, so it must own what it uses, and `what` says in the
// message what was not done in time. The same if `interrupted` says why not to wait any
// longer, which is then the answer. Some calls of NCCL block without an end when a
// peer is dead, and nothing can interrupt them.
shm::Status run_aside(const std::string& what, shm::Deadline deadline,
                      std::function<shm::Status()> work,
                      const Interrupted& interrupted = nullptr);

}  // namespace weightsync::nccl
