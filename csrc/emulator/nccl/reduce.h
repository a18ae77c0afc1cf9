// Reduction: combines the inputs of all ranks element by element, as NCCL's kernels do.
//
// The inputs are combined in the order given, with rounding to the type after each
// step, so that whoever reduces the same inputs gets the same bits. Pure functions; the
// memory may have any alignment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "emulator/nccl/numbers.h"

namespace weightsync::emulator::nccl {

// The first five have the values of ncclRedOp_t; the last is what handles stand for.
enum class Reduction : std::uint8_t {
  kSum,
  kProduct,
  kMaximum,
  kMinimum,
  kAverage,    // floats: multiplied by a rounded 1/n, then summed; integers: divided
               // after the sum, which wraps, towards zero
  kPreMulSum,  // every input multiplied by a factor of its own, then summed
};

inline constexpr int kBuiltInReductions = 5;

const char* name_of(Reduction reduction);

// What one rank contributes.
struct ReductionInput {
  const std::byte* data = nullptr;
  std::uint64_t factor = 0;  // the bytes of the factor of kPreMulSum, first in memory
};

// Writes `count` elements. The output may be one of the inputs, or overlap none.
void reduce_elements(Reduction reduction, DataType type,
                     const std::vector<ReductionInput>& inputs, std::byte* output,
                     std::size_t count);

}  // namespace weightsync::emulator::nccl
