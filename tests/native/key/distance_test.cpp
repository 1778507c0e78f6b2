// How far payloads are from each other, against a plain computation in doubles.
#include "key/distance.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "check.h"

namespace kvpool {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNoNumber = std::numeric_limits<double>::quiet_NaN();

// A format by its definition, with its largest number written down.
struct Format {
  Element element;
  int exponent_bits, mantissa_bits, bias;
  bool has_infinity;
  double largest;
};

constexpr Format kFormats[] = {
    {Element::kFloat32, 8, 23, 127, true, 0x1.fffffep127}, {Element::kFloat16, 5, 10, 15, true, 65504},
    {Element::kBfloat16, 8, 7, 127, true, 0x1.fep127},     {Element::kFloat8E4M3, 4, 3, 7, false, 448},
    {Element::kFloat8E5M2, 5, 2, 15, true, 57344},
};

int bits_of(const Format& format) { return 1 + format.exponent_bits + format.mantissa_bits; }

double value_of(const Format& format, std::uint32_t bits) {
  const int most = (1 << format.exponent_bits) - 1;
  const int exponent = static_cast<int>(bits >> format.mantissa_bits) & most;
  const auto mantissa = static_cast<int>(bits & ((1U << format.mantissa_bits) - 1));
  const double sign = (bits >> (bits_of(format) - 1)) != 0 ? -1 : 1;
  const double part = mantissa / std::pow(2, format.mantissa_bits);
  if (exponent == most && format.has_infinity) return mantissa == 0 ? sign * kInfinity : kNoNumber;
  if (exponent == most && mantissa == (1 << format.mantissa_bits) - 1) return kNoNumber;
  if (exponent == 0) return sign * part * std::pow(2, 1 - format.bias);
  return sign * (1 + part) * std::pow(2, exponent - format.bias);
}

void append(std::vector<std::byte>& bytes, const Format& format, std::uint32_t bits) {
  for (int at = 0; at < bits_of(format); at += 8) bytes.push_back(static_cast<std::byte>(bits >> at));
}

Distance between(const Format& format, std::uint32_t ours, std::uint32_t theirs) {
  std::vector<std::byte> one, other;
  append(one, format, ours);
  append(other, format, theirs);
  return distance(format.element, one, other);
}

bool close(double found, double wanted) {
  return found == wanted || std::fabs(found - wanted) <= 1e-12 * std::fabs(wanted);
}

// All bits of a format; of float32 a part, with every exponent and both signs.
std::vector<std::uint32_t> all_bits(const Format& format) {
  std::vector<std::uint32_t> all;
  if (bits_of(format) < 32) {
    for (std::uint32_t bits = 0; bits < 1U << bits_of(format); ++bits) all.push_back(bits);
    return all;
  }
  for (std::uint32_t high = 0; high < 512; ++high) {
    for (const std::uint32_t mantissa : {0U, 1U, 0x3fffffU, 0x400000U, 0x555555U, 0x7fffffU})
      all.push_back(high << 23 | mantissa);
  }
  return all;
}

}  // namespace

TEST(elements_have_the_names_and_sizes_of_torch) {
  CHECK(parse_element("float32") == Element::kFloat32 && element_nbytes(Element::kFloat32) == 4);
  CHECK(parse_element("float16") == Element::kFloat16 && element_nbytes(Element::kFloat16) == 2);
  CHECK(parse_element("bfloat16") == Element::kBfloat16 && element_nbytes(Element::kBfloat16) == 2);
  CHECK(parse_element("float8_e4m3fn") == Element::kFloat8E4M3 && element_nbytes(Element::kFloat8E4M3) == 1);
  CHECK(parse_element("float8_e5m2") == Element::kFloat8E5M2 && element_nbytes(Element::kFloat8E5M2) == 1);
  for (const char* name : {"", "float", "float64", "uint8", "int8", "float8_e4m3fnuz", "Float32", "float32 "})
    CHECK(!parse_element(name));
}

TEST(every_number_of_every_format_is_read_as_defined) {
  for (const Format& format : kFormats) {
    double largest = 0;
    for (const std::uint32_t bits : all_bits(format)) {
      const double value = value_of(format, bits);
      const Distance from = between(format, 0, bits), to = between(format, bits, 0);
      if (!std::isfinite(value)) {
        CHECK(from.difference == kInfinity && to.difference == kInfinity);
        CHECK(from.norm == 0 && to.norm == 0);
        continue;
      }
      largest = std::fmax(largest, std::fabs(value));
      CHECK(close(from.difference, value * value) && from.norm == 0);
      CHECK(close(to.difference, value * value) && close(to.norm, value * value));
      const std::uint32_t one = static_cast<std::uint32_t>(format.bias) << format.mantissa_bits;
      CHECK(close(between(format, one, bits).difference, (value - 1) * (value - 1)));  // the sign counts
    }
    CHECK(largest == format.largest);
  }
}

TEST(fp8_of_machine_learning_has_two_no_numbers_and_nothing_infinite) {
  const Format& format = kFormats[3];
  int no_numbers = 0;
  for (std::uint32_t bits = 0; bits < 256; ++bits)
    no_numbers += between(format, 0, bits).difference == kInfinity;
  CHECK(no_numbers == 2);
  CHECK(between(format, 0, 0x7f).difference == kInfinity && between(format, 0, 0xff).difference == kInfinity);
  CHECK(between(format, 0, 0x7e).difference == 448.0 * 448 &&
        between(format, 0, 0xfe).difference == 448.0 * 448);
}

TEST(what_is_no_number_on_both_sides_counts_nothing_and_on_one_makes_an_infinite_distance) {
  for (const Format& format : kFormats) {
    const auto infinite = ((1U << format.exponent_bits) - 1) << format.mantissa_bits;
    const auto no_number = infinite | ((1U << format.mantissa_bits) - 1);
    const auto sign = 1U << (bits_of(format) - 1);
    for (const std::uint32_t special : {infinite, no_number}) {
      if (std::isfinite(value_of(format, special))) continue;
      const Distance same = between(format, special, special);
      CHECK(same.difference == 0 && same.norm == 0);
      CHECK(between(format, special, 1).difference == kInfinity);
      CHECK(between(format, 1, special).difference == kInfinity);
      CHECK(between(format, special, special | sign).difference == kInfinity);
    }
    if (format.has_infinity) CHECK(between(format, infinite, no_number).difference == kInfinity);
  }
}

TEST(subnormal_numbers_are_not_taken_for_zero) {
  for (const Format& format : kFormats) {
    const double least = std::pow(2, 1 - format.bias - format.mantissa_bits);
    CHECK(between(format, 1, 0).norm == least * least && between(format, 1, 0).difference == least * least);
    CHECK(between(format, 2, 1).difference == least * least);
  }
}

TEST(opposite_zeros_are_equal) {
  for (const Format& format : kFormats)
    CHECK(between(format, 0, 1U << (bits_of(format) - 1)).difference == 0);
}

TEST(sums_are_those_of_a_plain_computation_at_every_length_and_alignment) {
  std::mt19937 random(7);
  for (const Format& format : kFormats) {
    for (const std::size_t count : {0, 1, 2, 3, 7, 8, 31, 257, 4099}) {
      for (const std::size_t shift : {0, 1, 3}) {
        std::vector<std::byte> ours(shift), theirs(2 * shift);
        double difference = 0, norm = 0;
        for (std::size_t i = 0; i < count; ++i) {
          std::uint32_t one, other;
          do {
            one = static_cast<std::uint32_t>(random()) & (0xffffffffU >> (32 - bits_of(format)));
            other = random() % 4 == 0 ? one : one ^ (1U << (random() % format.mantissa_bits));
          } while (!std::isfinite(value_of(format, one)) || !std::isfinite(value_of(format, other)));
          append(ours, format, one);
          append(theirs, format, other);
          const double value = value_of(format, one), apart = value_of(format, other) - value;
          difference += apart * apart;
          norm += value * value;
        }
        const Distance found =
            distance(format.element, std::span(ours).subspan(shift), std::span(theirs).subspan(2 * shift));
        CHECK(close(found.difference, difference) && close(found.norm, norm));
      }
    }
  }
}

TEST(one_place_that_is_no_number_leaves_the_norm_of_the_others) {
  const Format& format = kFormats[2];
  std::vector<std::byte> ours, theirs;
  for (const std::uint32_t bits : {0x3f80U, 0x7fc0U, 0x4000U}) append(ours, format, bits);    // 1, none, 2
  for (const std::uint32_t bits : {0x3f80U, 0x3f80U, 0x4000U}) append(theirs, format, bits);  // 1, 1, 2
  const Distance found = distance(format.element, ours, theirs);
  CHECK(found.difference == kInfinity && found.norm == 5);
}

TEST(numbers_whose_squares_are_beyond_a_float_are_summed) {
  const Format& format = kFormats[0];
  const std::uint32_t largest = std::bit_cast<std::uint32_t>(std::numeric_limits<float>::max());
  const double value = std::numeric_limits<float>::max();
  const Distance found = between(format, largest, largest | 1U << 31);
  CHECK(found.norm == value * value && found.difference == 4 * value * value);
}

}  // namespace kvpool
