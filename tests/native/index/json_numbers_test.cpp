#include "index/json_numbers.h"

#include <limits>
#include <stdexcept>
#include <string_view>

#include "check.h"

namespace kvpool {
namespace {

constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();

std::vector<std::uint64_t> read(std::string_view text) { return json_numbers(text, 5, kMax, true); }

template <typename Error>
bool refused(std::string_view text, std::uint64_t max = kMax, bool is_signed = true) {
  try {
    json_numbers(text, 5, max, is_signed);
  } catch (const Error&) {
    return true;
  }
  return false;
}

}  // namespace

TEST(lists_of_whole_numbers_are_read) {
  CHECK(read("[]").empty() && read(" [ \n] ").empty());
  CHECK(read("[0]") == std::vector<std::uint64_t>{0});
  CHECK(read("\t[ 1,22 ,\r\n333 ] ") == (std::vector<std::uint64_t>{1, 22, 333}));
  CHECK(read("[18446744073709551615,-1,-9223372036854775808,-0]") ==
        (std::vector<std::uint64_t>{kMax, kMax, std::uint64_t{1} << 63, 0}));
  CHECK(json_numbers("[1,2,3,4,5]", 5, 5, false).size() == 5);
}

TEST(what_is_no_such_list_is_refused) {
  for (const std::string_view text :
       {"",      "[",       "]",      "1",      "[1",    "[1,",   "[1,]",          "[,1]",  "[1 2]",
        "[1]]",  "[1]x",    "[01]",   "[00]",   "[+1]",  "[- 1]", "[-]",           "[1.0]", "[1e2]",
        "[1E2]", "[\"1\"]", "[null]", "[true]", "[[1]]", "{}",    "[1,2,3,4,5,6]", "[0x1]", "[1_0]"}) {
    CHECK(refused<std::invalid_argument>(text));
  }
  CHECK(refused<std::invalid_argument>(std::string_view("[1]\0", 4)));
  for (const std::string_view text :
       {"[18446744073709551616]", "[-9223372036854775809]", "[99999999999999999999999]"}) {
    CHECK(refused<std::overflow_error>(text));
  }
  CHECK(refused<std::overflow_error>("[-1]", 7, false) && refused<std::overflow_error>("[8]", 7, false));
}

}  // namespace kvpool
