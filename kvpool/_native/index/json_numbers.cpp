// A list of whole numbers in JSON (RFC 8259), digit by digit.
#include "index/json_numbers.h"

#include <charconv>
#include <stdexcept>
#include <string>
#include <system_error>

namespace kvpool {
namespace {

class Reader {
 public:
  explicit Reader(std::string_view text) : at_(text.data()), end_(text.data() + text.size()) {}

  // The next byte that is no space; 0 at the end, invalid in a list.
  char peek() {
    while (at_ != end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\t' || *at_ == '\r')) ++at_;
    return at_ == end_ ? '\0' : *at_;
  }

  void expect(char wanted) {
    if (peek() != wanted) fail();
    ++at_;
  }

  bool take(char wanted) {
    if (peek() != wanted) return false;
    ++at_;
    return true;
  }

  // JSON's digits: no leading zero.
  std::uint64_t digits() {
    if (at_ == end_ || *at_ < '0' || *at_ > '9') fail();
    std::uint64_t value = 0;
    const auto [stop, error] = std::from_chars(at_, end_, value);
    if (*at_ == '0' && stop - at_ > 1) fail();
    if (stop != end_ && (*stop == '.' || *stop == 'e' || *stop == 'E')) fail();
    if (error != std::errc()) throw std::overflow_error("a number is out of range");
    at_ = stop;
    return value;
  }

  void expect_end() {
    if (peek() != '\0' || at_ != end_) fail();
  }

 private:
  [[noreturn]] static void fail() { throw std::invalid_argument("is a list of whole numbers"); }

  const char* at_;
  const char* end_;
};

}  // namespace

std::vector<std::uint64_t> json_numbers(std::string_view text, std::size_t most, std::uint64_t highest,
                                        bool is_signed) {
  constexpr std::uint64_t kLowest = std::uint64_t{1} << 63;
  std::vector<std::uint64_t> numbers;
  Reader reader(text);
  reader.expect('[');
  if (!reader.take(']')) {
    do {
      if (numbers.size() == most)
        throw std::invalid_argument("has more than " + std::to_string(most) + " numbers");
      const bool negative = reader.take('-');  // skips the space before a number; none may follow a sign
      const std::uint64_t value = reader.digits();
      if (negative && value != 0 ? !is_signed || value > kLowest : value > highest) {
        throw std::overflow_error("a number is out of range");
      }
      numbers.push_back(negative ? 0 - value : value);
    } while (reader.take(','));
    reader.expect(']');
  }
  reader.expect_end();
  return numbers;
}

}  // namespace kvpool
