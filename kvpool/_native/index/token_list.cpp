#include "index/token_list.h"

#include <charconv>
#include <stdexcept>
#include <string>
#include <system_error>

namespace kvpool {

std::vector<std::uint32_t> read_token_list(std::string_view text, std::size_t most) {
  const auto fail = [] { throw std::invalid_argument("is a list of whole numbers"); };
  // The next byte that is no space; 0 at the end, invalid in a list.
  const auto peek = [&] {
    while (text.starts_with(' ') || text.starts_with('\n') || text.starts_with('\t') ||
           text.starts_with('\r'))
      text.remove_prefix(1);
    return text.empty() ? '\0' : text[0];
  };
  const auto take = [&](char wanted) {
    if (peek() != wanted) return false;
    text.remove_prefix(1);
    return true;
  };
  std::vector<std::uint32_t> numbers;
  if (!take('[')) fail();
  while (!take(']')) {
    if (!numbers.empty() && !take(',')) fail();
    if (numbers.size() == most)
      throw std::invalid_argument("has more than " + std::to_string(most) + " numbers");
    peek();
    std::uint32_t number = 0;
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, number);
    if (error == std::errc::result_out_of_range) throw std::invalid_argument("a number is out of range");
    // JSON has no leading zero; a fraction or an exponent is no ',' or ']'.
    if (error != std::errc() || (text[0] == '0' && stop - text.data() > 1)) fail();
    text = {stop, static_cast<std::size_t>(end - stop)};
    numbers.push_back(number);
  }
  if (peek() != '\0' || !text.empty()) fail();
  return numbers;
}

}  // namespace kvpool
