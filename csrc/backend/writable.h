// first_unwritable: finds a tensor that a copy would crash on, before the copy.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace weightsync {

// The index of the first tensor with a page that cannot be written (a read-only
// mapping, a protected page), or -1. Writing there would end the process with SIGSEGV,
// so the kernel is asked to make the pages present for writing instead; that also
// spares the first copy the page faults. Where it cannot be asked (Linux before 5.14),
// everything counts as writable.
std::int64_t first_unwritable(const std::vector<at::Tensor>& tensors);

}  // namespace weightsync
