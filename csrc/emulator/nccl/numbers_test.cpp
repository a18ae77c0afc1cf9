#include "emulator/nccl/numbers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace weightsync::emulator::nccl {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const float kNan = std::nanf("");

template <class T>
T of_bits(unsigned bits) {
  return T{{static_cast<typename T::Bits>(bits)}};
}

template <class T>
constexpr unsigned kSignBit = 1U << (8 * sizeof(typename T::Bits) - 1);

// What the bits mean, straight from the definition of the format.
template <class T>
double meaning(unsigned bits) {
  const unsigned magnitude = bits & (kSignBit<T> - 1);
  const double sign = (bits & kSignBit<T>) != 0 ? -1.0 : 1.0;
  if (magnitude > T::kInfinity) return std::nan("");
  if (magnitude == T::kInfinity && T::kInfinity != 0x7e) {
    return sign * std::numeric_limits<double>::infinity();
  }
  const int exponent = static_cast<int>(magnitude >> T::kMantissa);
  const double fraction = static_cast<double>(magnitude & ((1U << T::kMantissa) - 1)) /
                          static_cast<double>(1U << T::kMantissa);
  return sign * std::ldexp(fraction + (exponent > 0 ? 1 : 0),
                           std::max(exponent, 1) - T::kBias);
}

// The nearest value by search. Past the largest finite one there is one more step,
// which is infinity, or saturates.
template <class T>
unsigned nearest(double value) {
  if (std::isnan(value)) return T::kNan;
  const unsigned sign = std::signbit(value) ? kSignBit<T> : 0;
  value = std::fabs(value);
  const unsigned largest = T::kInfinity == 0x7e ? 0x7e : T::kInfinity - 1;
  const double above = 2 * meaning<T>(largest) - meaning<T>(largest - 1);
  unsigned low = 0;
  unsigned high = largest + 1;  // stands for `above`
  while (high - low > 1) {
    const unsigned middle = (low + high) / 2;
    (meaning<T>(middle) <= value ? low : high) = middle;
  }
  const double below = meaning<T>(low);
  const double next = low == largest ? above : meaning<T>(low + 1);
  const double to_low = value - below;
  const double to_next = next - value;
  unsigned bits = low;
  if (to_next < to_low || (to_next == to_low && low % 2 == 1)) bits = low + 1;
  return sign | std::min(bits, T::kLargest);
}

template <class T>
class SmallFloat : public ::testing::Test {};
using SmallFloats = ::testing::Types<Half, Bfloat16, Float8E4M3, Float8E5M2>;
TYPED_TEST_SUITE(SmallFloat, SmallFloats);

TYPED_TEST(SmallFloat, every_value_means_what_its_format_says) {
  for (unsigned bits = 0; bits < 2 * kSignBit<TypeParam>; ++bits) {
    const float value = to_float(of_bits<TypeParam>(bits));
    const double expected = meaning<TypeParam>(bits);

    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(value)) << std::hex << bits;
    } else {
      ASSERT_EQ(static_cast<float>(expected), value) << std::hex << bits;
      ASSERT_EQ(std::signbit(expected), std::signbit(value)) << std::hex << bits;
    }
  }
}

TYPED_TEST(SmallFloat, every_finite_value_survives_a_round_trip) {
  for (unsigned bits = 0; bits < 2 * kSignBit<TypeParam>; ++bits) {
    const TypeParam value = of_bits<TypeParam>(bits);
    if (!std::isfinite(meaning<TypeParam>(bits))) continue;

    ASSERT_EQ(bits, from_float<TypeParam>(to_float(value)).bits);
  }
}

TYPED_TEST(SmallFloat, rounds_to_nearest_even_at_and_around_every_midpoint) {
  for (unsigned bits = 0; bits < TypeParam::kInfinity; ++bits) {
    const double low = meaning<TypeParam>(bits);
    const double high = meaning<TypeParam>(bits + 1);
    const double middle = std::isfinite(high) ? (low + high) / 2 : low;
    const auto at = static_cast<float>(middle);
    for (const float value :
         {at, std::nextafter(at, kInfinity), std::nextafter(at, -kInfinity), -at}) {
      ASSERT_EQ(nearest<TypeParam>(value), from_float<TypeParam>(value).bits) << value;
    }
  }
}

TYPED_TEST(SmallFloat, rounds_any_float_to_the_nearest_value) {
  std::mt19937 random(1);
  for (int i = 0; i < 200000; ++i) {
    const auto value = bits_as<float>(static_cast<std::uint32_t>(random()));

    ASSERT_EQ(nearest<TypeParam>(value), from_float<TypeParam>(value).bits) << value;
  }
}

TYPED_TEST(SmallFloat, a_nan_becomes_the_one_of_a_gpu) {
  const unsigned expected = TypeParam::kNan;

  EXPECT_EQ(expected, from_float<TypeParam>(kNan).bits);
  EXPECT_EQ(expected, from_float<TypeParam>(-kNan).bits);
  if (TypeParam::kBias != 127) {  // bfloat16 to float only appends zeroes
    const auto negative = of_bits<TypeParam>(kSignBit<TypeParam> | TypeParam::kNan);
    EXPECT_EQ(0x7fffffffU, bits_as<std::uint32_t>(to_float(negative)));
  }
}

TYPED_TEST(SmallFloat, sums_and_products_are_rounded_exact_results) {
  std::mt19937 random(2);
  for (int i = 0; i < 100000; ++i) {
    const unsigned a = random() % (2 * kSignBit<TypeParam>);
    const unsigned b = random() % (2 * kSignBit<TypeParam>);
    const auto round = [](double exact) {
      if (!kIsFloat8<TypeParam>) return nearest<TypeParam>(exact);
      return nearest<TypeParam>(meaning<Half>(nearest<Half>(exact)));
    };

    // A double holds the sum and the product of any two, except where bfloat16's
    // exponents are far apart, and there the smaller one does not matter.
    ASSERT_EQ(round(meaning<TypeParam>(a) + meaning<TypeParam>(b)),
              add(of_bits<TypeParam>(a), of_bits<TypeParam>(b)).bits)
        << std::hex << a << " + " << b;
    ASSERT_EQ(round(meaning<TypeParam>(a) * meaning<TypeParam>(b)),
              multiply(of_bits<TypeParam>(a), of_bits<TypeParam>(b)).bits)
        << std::hex << a << " * " << b;
  }
}

TYPED_TEST(SmallFloat, extremes_order_all_values_and_prefer_them_to_a_nan) {
  std::mt19937 random(3);
  for (int i = 0; i < 100000; ++i) {
    const unsigned a = random() % (2 * kSignBit<TypeParam>);
    const unsigned b = random() % (2 * kSignBit<TypeParam>);
    const double of_a = meaning<TypeParam>(a);
    const double of_b = meaning<TypeParam>(b);
    const auto greater = extreme<true>(of_bits<TypeParam>(a), of_bits<TypeParam>(b));
    const auto smaller = extreme<false>(of_bits<TypeParam>(a), of_bits<TypeParam>(b));

    if (std::isnan(of_a) && std::isnan(of_b)) {
      ASSERT_EQ(TypeParam::kNan, greater.bits);
      ASSERT_EQ(TypeParam::kNan, smaller.bits);
    } else {
      ASSERT_EQ(std::fmax(of_a, of_b), meaning<TypeParam>(greater.bits));
      ASSERT_EQ(std::fmin(of_a, of_b), meaning<TypeParam>(smaller.bits));
    }
  }
}

TEST(Numbers, float8_saturates_where_float16_overflows) {
  EXPECT_EQ(0x7e, from_float<Float8E4M3>(1e9F).bits);
  EXPECT_EQ(0xfe, from_float<Float8E4M3>(-kInfinity).bits);
  EXPECT_EQ(0x7b, from_float<Float8E5M2>(kInfinity).bits);
  EXPECT_EQ(0x7b, from_float<Float8E5M2>(61440.0F).bits);
  EXPECT_EQ(0x7c00, from_float<Half>(65520.0F).bits);
  EXPECT_EQ(0x7bff, from_float<Half>(65519.0F).bits);
  EXPECT_EQ(0x7f80, from_float<Bfloat16>(3.4e38F).bits);
}

TEST(Numbers, known_encodings) {
  EXPECT_EQ(0x3c00, from_float<Half>(1.0F).bits);
  EXPECT_EQ(0x3555, from_float<Half>(1.0F / 3).bits);
  EXPECT_EQ(0x0001, from_float<Half>(6e-8F).bits);
  EXPECT_EQ(0x3f80, from_float<Bfloat16>(1.0F).bits);
  EXPECT_EQ(0x3eab, from_float<Bfloat16>(1.0F / 3).bits);
  EXPECT_EQ(0x38, from_float<Float8E4M3>(1.0F).bits);
  EXPECT_EQ(0x2b, from_float<Float8E4M3>(1.0F / 3).bits);
  EXPECT_EQ(0x3c, from_float<Float8E5M2>(1.0F).bits);
  EXPECT_EQ(0x35, from_float<Float8E5M2>(1.0F / 3).bits);
}

TEST(Numbers, integers_wrap_around) {
  EXPECT_EQ(-128, add<std::int8_t>(127, 1));
  EXPECT_EQ(4, add<std::uint8_t>(250, 10));
  EXPECT_EQ(std::numeric_limits<std::int32_t>::min(), add<std::int32_t>(INT32_MAX, 1));
  EXPECT_EQ(std::numeric_limits<std::int64_t>::min(), add<std::int64_t>(INT64_MAX, 1));
  EXPECT_EQ(-2, multiply<std::int32_t>(INT32_MAX, 2));
  EXPECT_EQ(-2, multiply<std::int64_t>(INT64_MAX, 2));
  EXPECT_EQ(1, multiply<std::uint8_t>(255, 255));
}

TEST(Numbers, floats_yield_the_nan_of_a_gpu_whatever_the_operands) {
  const auto payload = bits_as<float>(0xffc12345U);

  EXPECT_EQ(0x7fffffffU, bits_as<std::uint32_t>(add(payload, 1.0F)));
  EXPECT_EQ(0x7fffffffU, bits_as<std::uint32_t>(multiply(1.0F, payload)));
  EXPECT_EQ(0x7fffffffU, bits_as<std::uint32_t>(add(kInfinity, -kInfinity)));
  EXPECT_EQ(0x7fffffffU, bits_as<std::uint32_t>(extreme<true>(payload, payload)));
}

TEST(Numbers, extremes_of_floats_and_doubles) {
  EXPECT_EQ(2.0F, extreme<true>(2.0F, kNan));
  EXPECT_EQ(2.0F, extreme<false>(kNan, 2.0F));
  EXPECT_FALSE(std::signbit(extreme<true>(-0.0F, 0.0F)));
  EXPECT_TRUE(std::signbit(extreme<false>(0.0F, -0.0F)));
  EXPECT_EQ(-1.0, extreme<true>(-1.0, -2.0));
  EXPECT_EQ(-2.0, extreme<false>(-1.0, -2.0));
  EXPECT_EQ(3.0, extreme<true>(std::nan(""), 3.0));
}

TEST(Numbers, sizes_and_names_of_the_types) {
  const std::vector<std::size_t> sizes = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  for (int type = 0; type < kDataTypes; ++type) {
    EXPECT_EQ(sizes[static_cast<std::size_t>(type)],
              size_of(static_cast<DataType>(type)));
    EXPECT_STRNE("unknown", name_of(static_cast<DataType>(type)));
  }

  EXPECT_FALSE(is_data_type(-1));
  EXPECT_FALSE(is_data_type(12));
}

}  // namespace
}  // namespace weightsync::emulator::nccl
