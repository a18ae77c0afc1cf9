// The faults of this process: its environment's, in force for NCCL and for memory.
//
// Part of libnccl.so.2, which reads them when it is loaded, so that the first
// allocation counts; a specification that cannot be read is said on stderr and ends the
// process with exit code 2. Lives as long as the process. Any thread may call.
// weightsync.testing.inject() changes them later.
#pragma once

#include "emulator/faults.h"

namespace weightsync::emulator::nccl {

Faults& process_faults();

}  // namespace weightsync::emulator::nccl

// For a process that was forked when the library was loaded and got its environment
// afterwards: reads the faults before the first allocation.
extern "C" void weightsync_emulator_read_faults();

// These entries and no others from now on, counted from now on. NULL, or why not; the
// text lasts until the next call of this thread.
extern "C" const char* weightsync_emulator_inject_faults(const char* text);
