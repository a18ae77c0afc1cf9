// WindowTable: the windows of one communicator on one rank, and how NCCL finds them.
//
// By handle, or by an address in them. The second way has a rule of its own, which
// shows where windows overlap: the window with the greatest start at or before the
// address is looked at, and no other. A plain value; its owner locks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "nccl/abi.h"

namespace weightsync::emulator::nccl {

// One window as its own rank sees it. Constant once it is in the table.
struct Window {
  std::byte* base = nullptr;   // the buffer, as registered
  std::size_t nbytes = 0;      // of this rank's window; peers may have other sizes
  std::size_t offset = 0;      // of the buffer in its allocation
  int flags = 0;               // NCCL_WIN_*
  bool putable = true;         // false: host memory, or of several allocations
  std::size_t stride_use = 0;  // bytes it takes of the address space of one rank

  // The memory of a rank, as this process sees it.
  struct Peer {
    std::byte* base = nullptr;      // of its allocation
    std::size_t nbytes = 0;         // of its allocation
    std::size_t window_nbytes = 0;  // of its window
    std::shared_ptr<void> keeps;    // the mapping, which outlives the allocation
  };
  std::vector<Peer> peers;

  bool symmetric() const { return (flags & kNcclWindowCollSymmetric) != 0; }
};

class WindowTable {
 public:
  // Nothing may be known about a handle but that it is this window's.
  std::shared_ptr<const Window> add(ncclWindow_t handle, Window window);

  std::shared_ptr<const Window> find(ncclWindow_t handle) const;

  // The window an address lies in, by the rule above; of windows that start at the same
  // address the last one registered counts.
  std::shared_ptr<const Window> find_address(const void* address) const;

  // Takes the handle out. Of windows that start at the same address the last one
  // registered can no longer be found by address, whichever was meant.
  bool remove(ncclWindow_t handle);

  // A window of this table that shares bytes with the range.
  std::shared_ptr<const Window> overlapping(const void* base, std::size_t nbytes) const;

  std::size_t size() const { return by_handle_.size(); }
  // Bytes that the live windows take of the address space reserved for one rank.
  std::size_t stride_used() const { return stride_used_; }

 private:
  std::map<ncclWindow_t, std::shared_ptr<const Window>> by_handle_;
  std::vector<std::shared_ptr<const Window>> by_address_;  // ascending, later last
  std::size_t stride_used_ = 0;
};

}  // namespace weightsync::emulator::nccl
