// Lists of token ids in JSON: what is taken has as many numbers as commas say, and says the same when written again.
#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "check.h"
#include "index/token_list.h"

using namespace kvpool;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  constexpr std::size_t kMost = 1000;
  const std::string_view text(reinterpret_cast<const char*>(data), nbytes);
  try {
    const auto numbers = read_token_list(text, kMost);
    CHECK(numbers.size() <= kMost);
    const auto commas = static_cast<std::size_t>(std::count(text.begin(), text.end(), ','));
    CHECK(numbers.empty() ? commas == 0 : numbers.size() == commas + 1);
    std::string again = "[";
    for (const std::uint32_t number : numbers) {
      if (again.size() > 1) again += ',';
      again += std::to_string(number);
    }
    CHECK(read_token_list(again + "]", kMost) == numbers);
  } catch (const std::invalid_argument&) {
  }
  return 0;
}
