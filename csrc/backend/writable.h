// first_unwritable: finds a tensor that a copy would crash on, before the copy.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace weightsync {

// The index of the first tensor whose memory begins in a page that cannot be written (a
// read-only mapping, a protected page), or -1. Writing there would end the process with
// SIGSEGV; the kernel is asked instead. Where a sandbox forbids to ask, everything
// counts as writable. Puts the first byte of each tensor back as it was read: call it
// where nobody else writes them.
std::int64_t first_unwritable(const std::vector<at::Tensor>& tensors);

}  // namespace weightsync
