// describe: what a layout depends on, of many tensors in one call.
#pragma once

#include <pybind11/pybind11.h>

#include <ATen/core/Tensor.h>

#include <vector>

namespace weightsync {

// Dtype, device, layout, lazy bits, sizes, strides and which tensors share memory, in
// an encoding of our own. Two lists of tensors with equal bytes have equal manifests,
// so a manifest made once can be used again. About 0.1 us a tensor.
pybind11::bytes describe(const std::vector<at::Tensor>& tensors);

}  // namespace weightsync
