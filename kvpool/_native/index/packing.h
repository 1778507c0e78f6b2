// Protobuf's writing of answers: varints, texts, columns of packed numbers.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace kvpool::packing {

inline void append_varint(std::string& out, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  out += static_cast<char>(value);
}

inline std::size_t varint_nbytes(std::uint64_t value) {
  return static_cast<std::size_t>(std::bit_width(value | 1) + 6) / 7;
}

// Of a field whose length comes next.
inline void append_tag(std::string& out, unsigned field) { append_varint(out, field << 3 | 2U); }

inline void append_text(std::string& out, unsigned field, std::string_view text) {
  append_tag(out, field);
  append_varint(out, text.size());
  out += text;
}

// Packed numbers, at least one; number(i) is row i's.
template <typename Number>
void append_column(std::string& out, unsigned field, std::size_t rows, Number number) {
  std::size_t nbytes = 0;
  for (std::size_t i = 0; i < rows; ++i) nbytes += varint_nbytes(number(i));
  append_tag(out, field);
  append_varint(out, nbytes);
  const std::size_t begin = out.size();
  out.resize(begin + nbytes);
  char* at = out.data() + begin;
  for (std::size_t i = 0; i < rows; ++i) {
    std::uint64_t value = number(i);
    for (; value >= 0x80; value >>= 7) *at++ = static_cast<char>(value | 0x80);
    *at++ = static_cast<char>(value);
  }
}

}  // namespace kvpool::packing
