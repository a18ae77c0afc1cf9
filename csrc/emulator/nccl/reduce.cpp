#include "emulator/nccl/reduce.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace weightsync::emulator::nccl {

namespace {

// Loops over a whole block, whose length is constant, are what compilers vectorise
// without being asked; so the last block is computed in full, too, and stored in part.
constexpr std::size_t kBlock = 512;

template <class T>
struct Block {
  T at[kBlock] = {};

  void load(const std::byte* data, std::size_t first, std::size_t count) {
    std::memcpy(at, data + first * sizeof(T), count * sizeof(T));
  }
  void store(std::byte* data, std::size_t first, std::size_t count) const {
    std::memcpy(data + first * sizeof(T), at, count * sizeof(T));
  }
  void multiply_by(T factor) {
    for (std::size_t i = 0; i < kBlock; ++i) at[i] = multiply(at[i], factor);
  }
  void divide_by(std::size_t divisor) {
    if constexpr (std::is_integral_v<T>) {
      const auto by = static_cast<T>(divisor);
      for (std::size_t i = 0; i < kBlock; ++i) at[i] = static_cast<T>(at[i] / by);
    }
  }
  template <class Combine>
  void combine(const Block& other, const Combine& combine) {
    for (std::size_t i = 0; i < kBlock; ++i) at[i] = combine(at[i], other.at[i]);
  }
};

template <class T>
T factor_of(std::uint64_t bytes) {
  T factor;
  std::memcpy(&factor, &bytes, sizeof factor);
  return factor;
}

// What each input is multiplied by before it is combined; empty if by nothing.
template <class T>
std::vector<T> factors_of(Reduction reduction,
                          const std::vector<ReductionInput>& inputs) {
  if (reduction == Reduction::kAverage && !std::is_integral_v<T>) {
    return std::vector<T>(inputs.size(),
                          reciprocal<T>(static_cast<int>(inputs.size())));
  }
  std::vector<T> factors;
  if (reduction != Reduction::kPreMulSum) return factors;
  factors.reserve(inputs.size());
  for (const ReductionInput& input : inputs) {
    factors.push_back(factor_of<T>(input.factor));
  }
  return factors;
}

template <class T, class Combine>
void reduce_with(Reduction reduction, const std::vector<ReductionInput>& inputs,
                 std::byte* output, std::size_t count, const Combine& combine) {
  const std::vector<T> factors = factors_of<T>(reduction, inputs);
  const bool divides = reduction == Reduction::kAverage && std::is_integral_v<T>;
  Block<T> result;
  Block<T> next;
  for (std::size_t first = 0; first < count; first += kBlock) {
    const std::size_t length = std::min(kBlock, count - first);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      Block<T>& block = i == 0 ? result : next;
      block.load(inputs[i].data, first, length);
      if (!factors.empty()) block.multiply_by(factors[i]);
      if (i > 0) result.combine(next, combine);
    }
    if (divides) result.divide_by(inputs.size());
    result.store(output, first, length);
  }
}

template <class T>
void reduce_as(Reduction reduction, const std::vector<ReductionInput>& inputs,
               std::byte* output, std::size_t count) {
  const auto with = [&](auto combine) {
    reduce_with<T>(reduction, inputs, output, count, combine);
  };
  switch (reduction) {
    case Reduction::kProduct:
      return with([](T a, T b) { return multiply(a, b); });
    case Reduction::kMaximum:
      return with([](T a, T b) { return extreme<true>(a, b); });
    case Reduction::kMinimum:
      return with([](T a, T b) { return extreme<false>(a, b); });
    case Reduction::kSum:
    case Reduction::kAverage:
    case Reduction::kPreMulSum:
      return with([](T a, T b) { return add(a, b); });
  }
}

}  // namespace

const char* name_of(Reduction reduction) {
  switch (reduction) {
    case Reduction::kSum:
      return "sum";
    case Reduction::kProduct:
      return "product";
    case Reduction::kMaximum:
      return "maximum";
    case Reduction::kMinimum:
      return "minimum";
    case Reduction::kAverage:
      return "average";
    case Reduction::kPreMulSum:
      return "pre-multiplied sum";
  }
  return "unknown";
}

void reduce_elements(Reduction reduction, DataType type,
                     const std::vector<ReductionInput>& inputs, std::byte* output,
                     std::size_t count) {
  with_type(type, [&](auto value) {
    reduce_as<decltype(value)>(reduction, inputs, output, count);
  });
}

}  // namespace weightsync::emulator::nccl
