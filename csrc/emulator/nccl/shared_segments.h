// Segments that ranks share, found by Locator: one address per segment in a process.
//
// Ranks that are threads of one process must use the same mapping, so that the thread
// sanitizer sees how they synchronise. Any thread may call anything.
#pragma once

#include <cstddef>
#include <memory>

#include "shm/segment.h"

namespace weightsync::emulator::nccl {

// Memory of zeroes that other ranks may open.
shm::Result<std::shared_ptr<shm::Segment>> create_shared(std::size_t nbytes);

// The creator's own mapping if this process is the creator, else a new mapping.
shm::Result<std::shared_ptr<shm::Segment>> open_shared(const shm::Locator& locator);

// Whether a process has ended, reaped or not.
bool is_process_gone(std::int64_t pid);

}  // namespace weightsync::emulator::nccl
