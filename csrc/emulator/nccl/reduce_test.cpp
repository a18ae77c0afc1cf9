#include "emulator/nccl/reduce.h"

#include <gtest/gtest.h>

#include <cctype>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

namespace weightsync::emulator::nccl {
namespace {

constexpr int kRanks = 5;

template <class T>
T from_double(double value) {
  if constexpr (kIsSmallFloat<T>) {
    return from_float<T>(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

template <class T>
T element(const std::byte* data, std::size_t index) {
  T value;
  std::memcpy(&value, data + index * sizeof(T), sizeof value);
  return value;
}

template <class T>
T factor_of(int rank) {
  return from_double<T>(rank + 2);
}

// One element, one rank after the other, as the contract says it.
template <class T>
T naive(Reduction reduction, const std::vector<ReductionInput>& inputs,
        std::size_t index) {
  const int ranks = static_cast<int>(inputs.size());
  T result{};
  for (int rank = 0; rank < ranks; ++rank) {
    T value = element<T>(inputs[static_cast<std::size_t>(rank)].data, index);
    if (reduction == Reduction::kPreMulSum) value = multiply(value, factor_of<T>(rank));
    if (reduction == Reduction::kAverage && !std::is_integral_v<T>) {
      value = multiply(value, from_double<T>(1.0 / ranks));
    }
    if (rank == 0) {
      result = value;
    } else if (reduction == Reduction::kProduct) {
      result = multiply(result, value);
    } else if (reduction == Reduction::kMaximum) {
      result = extreme<true>(result, value);
    } else if (reduction == Reduction::kMinimum) {
      result = extreme<false>(result, value);
    } else {
      result = add(result, value);
    }
  }
  if constexpr (std::is_integral_v<T>) {
    if (reduction == Reduction::kAverage) result = static_cast<T>(result / ranks);
  }
  return result;
}

std::vector<std::vector<std::byte>> random_inputs(std::size_t nbytes) {
  std::mt19937 random(7);
  std::vector<std::vector<std::byte>> inputs(kRanks, std::vector<std::byte>(nbytes));
  for (auto& input : inputs) {
    for (std::byte& each : input) each = static_cast<std::byte>(random());
  }
  return inputs;
}

using Case = std::tuple<int, int>;  // reduction, type

class Reduce : public ::testing::TestWithParam<Case> {
 protected:
  Reduction reduction() const {
    return static_cast<Reduction>(std::get<0>(GetParam()));
  }
  DataType type() const { return static_cast<DataType>(std::get<1>(GetParam())); }
};

TEST_P(Reduce, agrees_with_one_element_after_the_other) {
  for (const std::size_t count : {1, 3, 511, 512, 513, 2000}) {
    const std::size_t nbytes = count * size_of(type());
    const auto bytes = random_inputs(nbytes);
    with_type(type(), [&](auto zero) {
      using T = decltype(zero);
      std::vector<ReductionInput> inputs;
      for (int rank = 0; rank < kRanks; ++rank) {
        ReductionInput input{bytes[static_cast<std::size_t>(rank)].data()};
        const T factor = factor_of<T>(rank);
        std::memcpy(&input.factor, &factor, sizeof factor);
        inputs.push_back(input);
      }
      std::vector<std::byte> output(nbytes + 1, std::byte{0x5a});
      reduce_elements(reduction(), type(), inputs, output.data(), count);

      for (std::size_t i = 0; i < count; ++i) {
        const T expected = naive<T>(reduction(), inputs, i);
        ASSERT_EQ(0, std::memcmp(&expected, output.data() + i * sizeof(T), sizeof(T)))
            << i << " of " << count;
      }
      ASSERT_EQ(std::byte{0x5a}, output.back());
    });
  }
}

TEST_P(Reduce, gives_the_same_at_any_address_and_in_place) {
  const std::size_t count = 700;
  const std::size_t nbytes = count * size_of(type());
  auto bytes = random_inputs(nbytes + 1);
  std::vector<ReductionInput> inputs;
  for (const auto& each : bytes) inputs.push_back({each.data() + 1, 3});
  std::vector<std::byte> apart(nbytes);
  reduce_elements(reduction(), type(), inputs, apart.data(), count);
  reduce_elements(reduction(), type(), inputs, bytes[2].data() + 1, count);

  EXPECT_EQ(0, std::memcmp(apart.data(), bytes[2].data() + 1, nbytes));
}

INSTANTIATE_TEST_SUITE_P(
    AllReductionsAndTypes, Reduce,
    ::testing::Combine(::testing::Range(0, 6), ::testing::Range(0, kDataTypes)),
    [](const auto& param) {
      std::string name = name_of(static_cast<Reduction>(std::get<0>(param.param)));
      for (char& each : name) each = std::isalnum(each) != 0 ? each : '_';
      return name + "_of_" + name_of(static_cast<DataType>(std::get<1>(param.param)));
    });

template <class T>
T reduced(Reduction reduction, DataType type, const std::vector<T>& values,
          T factor = T{}) {
  std::vector<ReductionInput> inputs;
  for (const T& value : values) {
    ReductionInput input{reinterpret_cast<const std::byte*>(&value)};
    std::memcpy(&input.factor, &factor, sizeof factor);
    inputs.push_back(input);
  }
  T result{};
  reduce_elements(reduction, type, inputs, reinterpret_cast<std::byte*>(&result), 1);
  return result;
}

TEST(Reduction, an_average_of_floats_multiplies_by_a_rounded_reciprocal_first) {
  const float third = 1.0F / 3.0F;

  EXPECT_EQ(
      10.0F * third + 11.0F * third + 12.0F * third,
      reduced<float>(Reduction::kAverage, DataType::kFloat32, {10.0F, 11.0F, 12.0F}));
  // A third of seven rounds down to 2.33203125; a third of the sum would be seven.
  const Half seven = from_float<Half>(7.0F);
  EXPECT_EQ(6.99609375F, to_float(reduced<Half>(Reduction::kAverage, DataType::kFloat16,
                                                {seven, seven, seven})));
}

TEST(Reduction, an_average_of_integers_sums_with_wrap_around_then_truncates) {
  EXPECT_EQ(-2,
            reduced<std::int32_t>(Reduction::kAverage, DataType::kInt32, {-3, -1, -4}));
  EXPECT_EQ(2, reduced<std::int32_t>(Reduction::kAverage, DataType::kInt32, {3, 1, 4}));
  EXPECT_EQ(-28,
            reduced<std::int8_t>(Reduction::kAverage, DataType::kInt8, {100, 100}));
  EXPECT_EQ(22,
            reduced<std::uint8_t>(Reduction::kAverage, DataType::kUint8, {200, 100}));
}

TEST(Reduction, sums_of_narrow_floats_round_after_each_step) {
  // 2048 + 1 is 2048 in float16; exact arithmetic would give 2050.
  EXPECT_EQ(0x6800, reduced<Half>(Reduction::kSum, DataType::kFloat16,
                                  {{{0x6800}}, {{0x3c00}}, {{0x3c00}}})
                        .bits);
  EXPECT_EQ(0x4380, reduced<Bfloat16>(Reduction::kSum, DataType::kBfloat16,
                                      {{{0x4380}}, {{0x3f80}}, {{0x3f80}}})
                        .bits);
}

TEST(Reduction, a_maximum_ignores_a_nan_unless_there_is_nothing_else) {
  const float nan = std::numeric_limits<float>::quiet_NaN();

  EXPECT_EQ(-1.0F,
            reduced<float>(Reduction::kMaximum, DataType::kFloat32, {nan, -1.0F, nan}));
  EXPECT_EQ(-1.0F,
            reduced<float>(Reduction::kMinimum, DataType::kFloat32, {nan, -1.0F, nan}));
  EXPECT_TRUE(
      std::isnan(reduced<float>(Reduction::kMinimum, DataType::kFloat32, {nan, nan})));
}

TEST(Reduction, a_factor_multiplies_integers_too) {
  EXPECT_EQ(
      21, reduced<std::int64_t>(Reduction::kPreMulSum, DataType::kInt64, {1, 2, 4}, 3));
}

}  // namespace
}  // namespace weightsync::emulator::nccl
