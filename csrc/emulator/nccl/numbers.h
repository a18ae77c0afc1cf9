// Numbers: the twelve data types of NCCL, and their arithmetic as its kernels do it.
//
// Types narrower than 32 bits are kept as their bits. half and bfloat16 compute in
// float and round after every step; the 8-bit types compute in half and then round
// again, saturating to the largest finite value. Rounding is to nearest, ties to even.
// A NaN that an operation yields is always the one that a GPU yields, so that all ranks
// get the same bits. Integers wrap around.
//
// Pure functions without branches on the data, so that loops over them vectorise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace weightsync::emulator::nccl {

// The values are those of ncclDataType_t.
enum class DataType : int {
  kInt8,
  kUint8,
  kInt32,
  kUint32,
  kInt64,
  kUint64,
  kFloat16,
  kFloat32,
  kFloat64,
  kBfloat16,
  kFloat8E4M3,
  kFloat8E5M2,
};

inline constexpr int kDataTypes = 12;

// What a number that the caller gave means; ask before any other function here.
inline constexpr bool is_data_type(int value) {
  return value >= 0 && value < kDataTypes;
}

std::size_t size_of(DataType type);
const char* name_of(DataType type);

// How the bits of a floating-point type are laid out below its sign.
template <class BitsOf, int kMantissaBits, int kBiasOf, unsigned kLargestOf,
          unsigned kInfinityOf, unsigned kNanOf>
struct FloatLayout {
  using Bits = BitsOf;
  static constexpr int kMantissa = kMantissaBits;
  static constexpr int kBias = kBiasOf;
  static constexpr unsigned kLargest = kLargestOf;    // what overflow becomes
  static constexpr unsigned kInfinity = kInfinityOf;  // what is above it is a NaN
  static constexpr unsigned kNan = kNanOf;            // the one that a GPU yields

  Bits bits;
};

struct Half : FloatLayout<std::uint16_t, 10, 15, 0x7c00, 0x7c00, 0x7fff> {};
struct Bfloat16 : FloatLayout<std::uint16_t, 7, 127, 0x7f80, 0x7f80, 0x7fff> {};
struct Float8E4M3 : FloatLayout<std::uint8_t, 3, 7, 0x7e, 0x7e, 0x7f> {};
struct Float8E5M2 : FloatLayout<std::uint8_t, 2, 15, 0x7b, 0x7c, 0x7f> {};

template <class T>
inline constexpr bool kIsFloat8 =
    std::is_same_v<T, Float8E4M3> || std::is_same_v<T, Float8E5M2>;
template <class T>
inline constexpr bool kIsSmallFloat =
    std::is_same_v<T, Half> || std::is_same_v<T, Bfloat16> || kIsFloat8<T>;

template <class To, class From>
To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}

template <class T>
float to_float(T value) {
  if constexpr (std::is_same_v<T, Bfloat16>) {
    return bits_as<float>(std::uint32_t{value.bits} << 16);
  } else {
    constexpr int kShift = 23 - T::kMantissa;
    constexpr std::uint32_t kUnit = 1U << 23;  // of float's exponent
    constexpr std::uint32_t kRebias = (127 - T::kBias) * kUnit;
    constexpr int kSign = 8 * sizeof(value.bits) - 1;
    const std::uint32_t magnitude = value.bits & ((1U << kSign) - 1);
    const std::uint32_t sign = std::uint32_t{value.bits} >> kSign << 31;
    const std::uint32_t normal = (magnitude << kShift) + kRebias;
    // The mantissa of a denormal counts from the smallest normal number; subtracting
    // that in float is exact, and needs no denormal float.
    const float denormal =
        bits_as<float>(normal + kUnit) - bits_as<float>(kRebias + kUnit);
    const bool is_denormal = magnitude < (1U << T::kMantissa);
    std::uint32_t bits = is_denormal ? bits_as<std::uint32_t>(denormal) : normal;
    if constexpr (T::kLargest != 0x7e) {  // has an infinity
      bits = magnitude == T::kInfinity ? 0x7f800000U : bits;
    }
    const bool is_nan = magnitude > T::kInfinity;
    return bits_as<float>(is_nan ? 0x7fffffffU : bits | sign);
  }
}

template <class T>
T from_float(float value) {
  using Bits = typename T::Bits;
  const auto all = bits_as<std::uint32_t>(value);
  const std::uint32_t magnitude = all & 0x7fffffffU;
  const std::uint32_t sign = all >> 31 << (8 * sizeof(Bits) - 1);
  constexpr int kShift = 23 - T::kMantissa;
  constexpr std::uint32_t kRebias = static_cast<std::uint32_t>(T::kBias - 127) << 23;
  const std::uint32_t odd = (magnitude >> kShift) & 1U;
  std::uint32_t bits = (magnitude + kRebias + (1U << (kShift - 1)) - 1 + odd) >> kShift;
  if constexpr (T::kBias != 127) {
    // Added to this, float's own rounding leaves the bits of the denormal at the end.
    constexpr std::uint32_t kMagic = (127 + 1 - T::kBias + kShift) * (1U << 23);
    const auto denormal =
        bits_as<std::uint32_t>(bits_as<float>(magnitude) + bits_as<float>(kMagic)) -
        kMagic;
    bits = magnitude < ((128U - T::kBias) << 23) ? denormal : bits;
  }
  bits = bits < T::kLargest ? bits : T::kLargest;
  bits = magnitude > 0x7f800000U ? T::kNan : bits | sign;
  return T{{static_cast<Bits>(bits)}};
}

// The result of an operation, as a T: rounded, and with the NaN of a GPU.
template <class T>
T rounded(float value) {
  if constexpr (kIsFloat8<T>) {
    return from_float<T>(to_float(from_float<Half>(value)));
  } else {
    return from_float<T>(value);
  }
}

inline float with_gpu_nan(float value) {
  return value == value ? value : bits_as<float>(0x7fffffffU);
}

// Doubles carry the payload of one of their operands on a GPU; which one is not said.
inline double with_gpu_nan(double value) {
  return value == value ? value : std::numeric_limits<double>::quiet_NaN();
}

template <class T>
T add(T a, T b) {
  if constexpr (kIsSmallFloat<T>) {
    return rounded<T>(to_float(a) + to_float(b));
  } else if constexpr (std::is_integral_v<T>) {
    using Unsigned = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
  } else {
    return with_gpu_nan(a + b);
  }
}

template <class T>
T multiply(T a, T b) {
  if constexpr (kIsSmallFloat<T>) {
    return rounded<T>(to_float(a) * to_float(b));
  } else if constexpr (std::is_integral_v<T>) {
    // At least 32 bits: narrower operands would be promoted to a signed int.
    using Unsigned = std::common_type_t<std::make_unsigned_t<T>, std::uint32_t>;
    return static_cast<T>(static_cast<Unsigned>(a) * static_cast<Unsigned>(b));
  } else {
    return with_gpu_nan(a * b);
  }
}

// How a type is compared: by a signed integer that orders its values.
template <class T>
struct Order {
  using Key = T;  // integers
};
template <>
struct Order<float> {
  using Key = std::int32_t;
  static constexpr Key kInfinity = 0x7f800000;
  static constexpr Key kNan = 0x7fffffff;
};
template <>
struct Order<double> {
  using Key = std::int64_t;
  static constexpr Key kInfinity = 0x7ff0000000000000;
  static constexpr Key kNan = 0x7ff8000000000000;
};
template <class T>
struct SmallOrder {
  using Key = std::make_signed_t<typename T::Bits>;
  static constexpr Key kInfinity = T::kInfinity;
  static constexpr Key kNan = T::kNan;
};
template <>
struct Order<Half> : SmallOrder<Half> {};
template <>
struct Order<Bfloat16> : SmallOrder<Bfloat16> {};
template <>
struct Order<Float8E4M3> : SmallOrder<Float8E4M3> {};
template <>
struct Order<Float8E5M2> : SmallOrder<Float8E5M2> {};

// The greater (or smaller) of two. A NaN gives way to the other value, and -0 is
// smaller than +0.
template <bool kGreater, class T>
T extreme(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return (kGreater ? a > b : a < b) ? a : b;
  } else {
    using Key = typename Order<T>::Key;
    constexpr Key kMagnitude = std::numeric_limits<Key>::max();
    constexpr Key kWorst =
        kGreater ? std::numeric_limits<Key>::min() : std::numeric_limits<Key>::max();
    const auto key = [](Key bits) {
      const auto magnitude = static_cast<Key>(bits & kMagnitude);
      const auto ordered = static_cast<Key>(bits < 0 ? bits ^ kMagnitude : bits);
      return magnitude > Order<T>::kInfinity ? kWorst : ordered;
    };
    const auto of_a = bits_as<Key>(a);
    const auto of_b = bits_as<Key>(b);
    const Key key_a = key(of_a);
    const Key key_b = key(of_b);
    const Key chosen = (kGreater ? key_a > key_b : key_a < key_b) ? of_a : of_b;
    const bool is_nan = static_cast<Key>(chosen & kMagnitude) > Order<T>::kInfinity;
    return bits_as<T>(is_nan ? Order<T>::kNan : chosen);
  }
}

// 1/n in this type, by which the inputs of an average are multiplied.
template <class T>
T reciprocal(int n) {
  if constexpr (kIsSmallFloat<T>) {
    return from_float<T>(static_cast<float>(1.0 / n));
  } else {
    return static_cast<T>(1.0 / n);
  }
}

// Calls visit(T{}) with the C++ type of `type`.
template <class Visit>
auto with_type(DataType type, Visit&& visit) {
  switch (type) {
    case DataType::kInt8:
      return visit(std::int8_t{});
    case DataType::kUint8:
      return visit(std::uint8_t{});
    case DataType::kInt32:
      return visit(std::int32_t{});
    case DataType::kUint32:
      return visit(std::uint32_t{});
    case DataType::kInt64:
      return visit(std::int64_t{});
    case DataType::kUint64:
      return visit(std::uint64_t{});
    case DataType::kFloat16:
      return visit(Half{});
    case DataType::kFloat32:
      return visit(float{});
    case DataType::kFloat64:
      return visit(double{});
    case DataType::kBfloat16:
      return visit(Bfloat16{});
    case DataType::kFloat8E4M3:
      return visit(Float8E4M3{});
    case DataType::kFloat8E5M2:
      break;
  }
  return visit(Float8E5M2{});
}

}  // namespace weightsync::emulator::nccl
