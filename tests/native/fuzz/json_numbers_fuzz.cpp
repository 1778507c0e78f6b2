// Lists of numbers in JSON: what is taken has as many numbers as commas say, and says the same when written again.
//   input: a byte (1: signed), then the list
#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "check.h"
#include "index/json_numbers.h"

using namespace kvpool;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  constexpr std::size_t kMost = 1000;
  if (nbytes == 0) return 0;
  const bool is_signed = (data[0] & 1) != 0;
  const std::uint64_t max = is_signed ? std::numeric_limits<std::uint64_t>::max() : 0xffffffff;
  const std::string_view text(reinterpret_cast<const char*>(data + 1), nbytes - 1);
  try {
    const auto numbers = json_numbers(text, kMost, max, is_signed);
    CHECK(numbers.size() <= kMost);
    const auto commas = static_cast<std::size_t>(std::count(text.begin(), text.end(), ','));
    CHECK(numbers.empty() ? commas == 0 : numbers.size() == commas + 1);
    std::string again = "[";
    for (const std::uint64_t number : numbers) {
      CHECK(number <= max);
      if (again.size() > 1) again += ',';
      again += std::to_string(number);
    }
    CHECK(json_numbers(again + "]", kMost, max, is_signed) == numbers);
  } catch (const std::invalid_argument&) {
  } catch (const std::overflow_error&) {
  }
  return 0;
}
