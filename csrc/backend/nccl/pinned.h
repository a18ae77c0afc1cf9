// PinnedMemory: memory of the host that a GPU copies into, and out of, by itself.
//
// Whoever makes it owns the memory, and keeps it until `close`. Any thread may call
// anything, but closes it only when no copy is under way.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <vector>

namespace weightsync {

class PinnedMemory {
 public:
  // Pins the pages of a one-dimensional uint8 tensor of the host. Raises kUnsupported
  // without CUDA, kSystem where it refuses; then nothing is left behind.
  explicit PinnedMemory(at::Tensor memory);
  ~PinnedMemory() { close(); }
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  // Enqueues on the current stream the copy of runs of tensors, all on one GPU, into
  // this memory: no kernel. Raises kInvalid, before anything is enqueued.
  void copy_in(const std::vector<at::Tensor>& tensors, const at::Tensor& runs) const;

  // Unpins. Idempotent.
  void close();

 private:
  const at::Tensor memory_;
  std::atomic<bool> pinned_{false};
};

}  // namespace weightsync
