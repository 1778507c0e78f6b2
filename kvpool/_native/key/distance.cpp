#include "key/distance.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

namespace kvpool {
namespace {

// A float of fewer bits, with the exponent's bias of IEEE 754. `kFinite`: as float8_e4m3fn, whose largest exponent is one
// of numbers, and all ones no number.
template <unsigned kExponentBits, unsigned kMantissaBits, bool kFinite>
float widen(unsigned bits) {
  constexpr unsigned kMostExponent = (1U << kExponentBits) - 1;
  constexpr int kBias = static_cast<int>(kMostExponent / 2);
  const unsigned mantissa = bits & ((1U << kMantissaBits) - 1);
  const unsigned exponent = (bits >> kMantissaBits) & kMostExponent;
  const float sign = (bits >> (kExponentBits + kMantissaBits)) != 0 ? -1.0F : 1.0F;
  const bool is_special = exponent == kMostExponent && (!kFinite || mantissa + 1 == 1U << kMantissaBits);
  if (is_special) {
    const bool is_infinite = !kFinite && mantissa == 0;
    return sign *
           (is_infinite ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN());
  }
  const unsigned whole = exponent == 0 ? mantissa : mantissa | (1U << kMantissaBits);
  const int power = static_cast<int>(exponent == 0 ? 1 : exponent) - kBias - static_cast<int>(kMantissaBits);
  return sign * std::ldexp(static_cast<float>(whole), power);
}

template <unsigned kExponentBits, unsigned kMantissaBits, bool kFinite = false>
struct FloatsOf {
  using Bits = std::conditional_t<1 + kExponentBits + kMantissaBits == 8, std::uint8_t, std::uint16_t>;
  std::array<float, std::size_t{1} << (1 + kExponentBits + kMantissaBits)> values{};

  FloatsOf() {
    for (unsigned bits = 0; bits < values.size(); ++bits)
      values[bits] = widen<kExponentBits, kMantissaBits, kFinite>(bits);
  }
  static float value(Bits bits) {
    static const FloatsOf table;
    return table.values[bits];
  }
};

float from_bfloat16(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }
float from_float32(std::uint32_t bits) { return std::bit_cast<float>(bits); }

template <typename Bits, float (*kValue)(Bits)>
Distance distance_of(std::span<const std::byte> ours, std::span<const std::byte> theirs) {
  Distance sums;
  for (std::size_t at = 0; at + sizeof(Bits) <= ours.size(); at += sizeof(Bits)) {
    Bits one;
    Bits other;
    std::memcpy(&one, ours.data() + at, sizeof one);
    std::memcpy(&other, theirs.data() + at, sizeof other);
    const double value = double{kValue(one)};
    const double difference = double{kValue(other)} - value;
    if (std::isfinite(difference)) [[likely]] {
      sums.difference += difference * difference;
      sums.norm += value * value;
    } else if (one != other) {
      sums.difference = std::numeric_limits<double>::infinity();
    }
  }
  return sums;
}

}  // namespace

std::optional<Element> parse_element(std::string_view name) {
  constexpr std::array<std::pair<std::string_view, Element>, 5> kNames = {
      {{"float32", Element::kFloat32},
       {"float16", Element::kFloat16},
       {"bfloat16", Element::kBfloat16},
       {"float8_e4m3fn", Element::kFloat8E4M3},
       {"float8_e5m2", Element::kFloat8E5M2}}};
  for (const auto& [known, element] : kNames) {
    if (known == name) return element;
  }
  return std::nullopt;
}

std::size_t element_nbytes(Element element) {
  switch (element) {
    case Element::kFloat32:
      return 4;
    case Element::kFloat16:
    case Element::kBfloat16:
      return 2;
    default:
      return 1;
  }
}

Distance distance(Element element, std::span<const std::byte> ours, std::span<const std::byte> theirs) {
  using Float16 = FloatsOf<5, 10>;
  using Float8E4M3 = FloatsOf<4, 3, true>;
  using Float8E5M2 = FloatsOf<5, 2>;
  switch (element) {
    case Element::kFloat32:
      return distance_of<std::uint32_t, from_float32>(ours, theirs);
    case Element::kFloat16:
      return distance_of<std::uint16_t, Float16::value>(ours, theirs);
    case Element::kBfloat16:
      return distance_of<std::uint16_t, from_bfloat16>(ours, theirs);
    case Element::kFloat8E4M3:
      return distance_of<std::uint8_t, Float8E4M3::value>(ours, theirs);
    default:
      return distance_of<std::uint8_t, Float8E5M2::value>(ours, theirs);
  }
}

}  // namespace kvpool
