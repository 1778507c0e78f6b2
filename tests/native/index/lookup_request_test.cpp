#include "index/lookup_request.h"

#include <string>
#include <string_view>

#include "check.h"

namespace kvpool {
namespace {

using std::string_literals::operator""s;

std::string field(unsigned number, std::string_view value) {
  return std::string{static_cast<char>(number << 3 | 2), static_cast<char>(value.size())} +
         std::string(value);
}

std::optional<LookupRequest> read(const std::string& message) {
  return read_lookup_request(std::as_bytes(std::span(message)));
}

const std::string kScope = field(1, field(1, "m") + field(2, "t"));
const std::string kHashes = field(2, "12345678");
const std::string kTokens = field(3, "1234");

}  // namespace

TEST(lookups_of_hashes_and_of_tokens_are_read) {
  const std::string of_hashes = kScope + kHashes + field(5, "a") + field(5, "b");
  const auto hashes = read(of_hashes);
  CHECK(hashes && hashes->model == "m" && hashes->tenant == "t" && !hashes->in_tokens);
  CHECK(hashes->workers == (std::vector<std::string_view>{"a", "b"}));
  CHECK(hashes->prompt.data() == std::as_bytes(std::span(of_hashes)).data() + kScope.size() + 2);
  CHECK(hashes->prompt.size() == 8);
  const std::string of_tokens = kTokens + kScope;
  const auto tokens = read(of_tokens);
  CHECK(tokens && tokens->in_tokens && tokens->prompt.size() == 4 && tokens->model == "m");
  const std::string salted = field(1, field(1, "m") + field(5, "salt")) + kHashes;
  CHECK(read(salted));  // which block hashes have in them already
  const std::string longest = "\x12\xff\xff\x01"s + std::string(0x7fff, 'x');
  CHECK(read(longest) && read(longest)->prompt.size() == 0x7fff);
}

TEST(what_is_rare_or_malformed_is_left_to_protobuf) {
  for (const std::string& message : {
           ""s,  // no prompt
           kScope,
           kScope + kHashes + kHashes,
           kScope + kHashes + kTokens,
           kScope + kScope + kHashes,
           kScope + field(4, "text"),
           kScope + field(6, ""),
           kScope + kHashes + field(7, "unknown"),
           kScope + kHashes + "\x38\x01"s,                     // another wire type
           field(1, field(1, "m") + field(1, "n")) + kHashes,  // twice
           field(1, field(1, "m") + field(6, "")) + kHashes,   // images
           field(1, field(1, "m") + "\x08\x01"s) + kHashes,
           field(1, field(1, "m") + field(5, "salt")) + kTokens,
           field(1, field(1, "\xff")) + kHashes,  // no ASCII
           kScope + kHashes + field(5, "\xc3\xa4"),
           kScope + field(3, "12345"),  // no whole tokens
           kHashes.substr(0, kHashes.size() - 1),
           "\x12"s,
           "\x12\xff"s,
           "\x12\xff\xff\xff\xff\x01"s,  // a length of five bytes
       }) {
    CHECK(!read(message));
  }
}

}  // namespace kvpool
