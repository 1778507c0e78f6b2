// How far two payloads of KV are from each other, as numbers: a block that was computed twice differs by rounding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace kvpool {

// As torch calls them, little-endian.
enum class Element : std::uint8_t { kFloat32, kFloat16, kBfloat16, kFloat8E4M3, kFloat8E5M2 };
// Of "float32", "float16", "bfloat16", "float8_e4m3fn" or "float8_e5m2".
std::optional<Element> parse_element(std::string_view name);
std::size_t element_nbytes(Element element);

// Sums over elements. A place where one side is infinite or no number counts nothing if both have the same bits there;
// else `difference` is infinite.
struct Distance {
  double difference = 0;  // of squares of what they differ by
  double norm = 0;        // of squares of the first one's
};

// Both have the same length, a multiple of the element's. Alignment does not matter.
Distance distance(Element element, std::span<const std::byte> ours, std::span<const std::byte> theirs);

}  // namespace kvpool
