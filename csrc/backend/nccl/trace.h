// trace: the flight recorder of this process, and how it is dumped.
//
// One for the process, because a dump speaks of all of its groups: nothing is decided
// by it. Any thread may call anything; what may take the GIL, which is reading Python
// frames, runs aside with a deadline and without a lock.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "recorder/dump.h"
#include "recorder/recorder.h"
#include "shm/status.h"

namespace weightsync::trace {

// As large as WEIGHTSYNC_TRACE_BUFFER says (2000), or torch's TORCH_FR_BUFFER_SIZE or
// TORCH_NCCL_TRACE_BUFFER_SIZE.
recorder::Recorder& recorder();

// The job's rank of this process, which ends the names of its files.
void use_rank(std::int64_t rank);
// Of the files; nothing leaves it to the environment: WEIGHTSYNC_TRACE_FILE, or torch's
// TORCH_FR_DUMP_TEMP_FILE or TORCH_NCCL_DEBUG_INFO_TEMP_FILE. Without any, failures and
// signals write none.
void use_prefix(const std::string& prefix);
// "2.30.7", to be found in the dumps.
void use_library(const std::string& version);
// Lets the signal that WEIGHTSYNC_TRACE_SIGNAL names ask for a dump, if it names one.
void listen();

// Lets `look` see what is over by now, before each dump, as long as `owner` lives.
void look_before_dumps(std::weak_ptr<void> owner, std::function<void()> look);

// Where the calling thread is in Python, if WEIGHTSYNC_TRACE_FRAMES is 1.
recorder::Frames frames();

// As JSON. For `reason` see the dump.
std::string json(const std::string& reason);
// Writes both files, with the given prefix or else the one in use. kInvalid without
// any.
shm::Result<recorder::Files> dump(const std::string& prefix, const std::string& reason);
// A dump because of this failure, if a prefix is in use; the end of a group by its user
// is none. Takes ten seconds at most, logs where the files are, and never raises.
void dump_after(const shm::Status& why);

}  // namespace weightsync::trace
