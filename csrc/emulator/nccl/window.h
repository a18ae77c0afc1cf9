// Windows: what a communicator knows of its windows on this rank; made with the first
// window or one-sided operation. Used by window.cpp and rma.cpp only.
#pragma once

#include <cstddef>
#include <memory>

#include "emulator/nccl/comm.h"
#include "emulator/nccl/window_table.h"
#include "shm/annotations.h"

namespace weightsync::emulator::nccl {

struct Windows {
  shm::Mutex mu;
  WindowTable table WEIGHTSYNC_GUARDED_BY(mu);

  std::shared_ptr<const Window> find(ncclWindow_t handle) WEIGHTSYNC_EXCLUDES(mu);
  std::shared_ptr<const Window> find_address(const void* address)
      WEIGHTSYNC_EXCLUDES(mu);
};

// Whether windows can be had at all; without, registration succeeds and gives NULL.
bool has_symmetric_support();

// Where a rank's windows lie in its address space: how much of it there is, of this
// device.
std::size_t window_stride(std::size_t device_bytes);

}  // namespace weightsync::emulator::nccl
