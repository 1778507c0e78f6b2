#include "index/token_list.h"

#include <stdexcept>
#include <string_view>

#include "check.h"

namespace kvpool {
namespace {

using Tokens = std::vector<std::uint32_t>;

Tokens read(std::string_view text) { return read_token_list(text, 5); }

bool refused(std::string_view text) {
  try {
    read(text);
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

}  // namespace

TEST(lists_of_token_ids_are_read) {
  CHECK(read("[]").empty() && read(" [ \n] ").empty());
  CHECK(read("[0]") == Tokens{0});
  CHECK(read("\t[ 1,22 ,\r\n333 ] ") == (Tokens{1, 22, 333}));
  CHECK(read("[1,2,3,4,4294967295]") == (Tokens{1, 2, 3, 4, 4294967295}));
}

TEST(what_is_no_such_list_is_refused) {
  for (const std::string_view text :
       {"",      "[",       "]",      "1",      "[1",    "[1,",  "[1,]",          "[,1]",  "[1 2]",
        "[1]]",  "[1]x",    "[01]",   "[00]",   "[+1]",  "[-1]", "[-0]",          "[1.0]", "[1e2]",
        "[1E2]", "[\"1\"]", "[null]", "[true]", "[[1]]", "{}",   "[1,2,3,4,5,6]", "[0x1]", "[1_0]"}) {
    CHECK(refused(text));
  }
  CHECK(refused(std::string_view("[1]\0", 4)));
  CHECK(refused("[4294967296]") && refused("[99999999999999999999999]"));
}

}  // namespace kvpool
