// Hash chains against golden vectors, and what they refuse.
#include "key/hashing.h"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"

namespace kvpool {
namespace {

std::string hex(std::span<const std::byte> bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::byte b : bytes) {
    text += kDigits[std::to_integer<unsigned>(b) >> 4];
    text += kDigits[std::to_integer<unsigned>(b) & 15];
  }
  return text;
}

std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

// Each length of a CBOR head, at both ends of its range.
const std::vector<std::uint64_t> kTokens = {
    0, 23, 24, 255, 256, 65535, 65536, 4294967295, 4294967296, 18446744073709551615U, 1, 2, 3, 4, 5, 6, 7};

}  // namespace

TEST(digests_are_the_known_ones) {
  CHECK(hex(bytes_of(digest(HashAlgorithm::kSha256Cbor, bytes_of("abc")))) ==
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(hex(bytes_of(digest(HashAlgorithm::kXxhashCbor, bytes_of("abc")))) ==
        "06b05ab6733a618578af5f94892f3950");
}

// The answers are cbor2's and hashlib's (python-xxhash's): see vllm/utils/hashing.py.
TEST(chains_are_the_known_ones) {
  const std::string parent(32, 'p');
  const std::string extra =
      "\x81\x63"
      "abc";  // ("abc",)
  const Extras extras = {{1, extra}};
  CHECK(hex(hash_chain(HashAlgorithm::kSha256Cbor, parent, kTokens, 5, extras)) ==
        "f0f68541d4559356aa396a1ab872457428c0783905e20b42d55687f1a651db76"
        "64609da64c216867b7bcd90fe5b05e3edbec1ae77e33c6c3711af4004ed70ec3"
        "99278148afca5407464901aba318825dde49b997e42df81d6752e905044bc6d3");
  CHECK(hex(hash_chain(HashAlgorithm::kXxhashCbor, parent, kTokens, 5, extras)) ==
        "c76c9bd65747b08eace79d23e9d690e4"
        "2607facdeb410705c987561a344db362"
        "3ea25b50e7e6d4a0f3eacbd9c060607b");
}

TEST(only_full_blocks_are_hashed) {
  CHECK(hash_chain(HashAlgorithm::kSha256Cbor, "", kTokens, 18, {}).empty());
  CHECK(hash_chain(HashAlgorithm::kSha256Cbor, "", {}, 1, {}).empty());
  CHECK(hash_chain(HashAlgorithm::kSha256Cbor, "", kTokens, 17, {}).size() == 32);
  CHECK(hash_chain(HashAlgorithm::kXxhashCbor, "", kTokens, 8, {}).size() == 32);
  CHECK_THROWS(std::invalid_argument, hash_chain(HashAlgorithm::kSha256Cbor, "", kTokens, 0, {}));
  CHECK_THROWS(std::invalid_argument, parse_algorithm("sha256"));
}

TEST(low_words_are_the_last_eight_bytes) {
  const auto digests = hash_chain(HashAlgorithm::kXxhashCbor, "", kTokens, 8, {});
  const auto words = low_words(HashAlgorithm::kXxhashCbor, digests);
  CHECK(words.size() == 2);
  std::uint64_t expected = 0;
  for (std::size_t i = 8; i < 16; ++i) expected = expected << 8 | std::to_integer<std::uint64_t>(digests[i]);
  CHECK(words[0] == expected);
}

}  // namespace kvpool
