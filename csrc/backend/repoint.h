// repoint: lets tensors live in other memory, for whoever holds them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace weightsync {

// Exchanges the memory of each tensor's storage for that of `memory`, one for each, at
// an offset in bytes, without a copy. The storage object stays, so all tensors that
// share it (a parameter and what state_dict() made of it, views) see the new memory. It
// keeps that alive. Each tensor covers its whole storage, on the device of its memory;
// PlanError otherwise, before any is changed.
void repoint(const std::vector<at::Tensor>& tensors,
             const std::vector<at::Tensor>& memory,
             const std::vector<std::int64_t>& offsets);

}  // namespace weightsync
