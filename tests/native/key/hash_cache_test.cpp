// Hashes that are looked up are those that are computed.
#include "key/hash_cache.h"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"

namespace kvpool {
namespace {

constexpr std::size_t kBlocks = 3 * HashCache::kSegmentBlocks + 5;

std::vector<std::uint64_t> tokens_from(std::uint64_t first) {
  std::vector<std::uint64_t> tokens(kBlocks * 2 + 1);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = first + i * i;
  return tokens;
}

std::vector<std::uint64_t> computed(const std::vector<std::uint64_t>& tokens, const Extras& extras) {
  return low_words(HashAlgorithm::kSha256Cbor,
                   hash_chain(HashAlgorithm::kSha256Cbor, "parent", tokens, 2, extras));
}

}  // namespace

TEST(looked_up_hashes_are_the_computed_ones) {
  const std::string extra = "\x81\x61z", other = "\x81\x61y";
  for (const std::size_t nbytes : {0, 1 << 10, 1 << 20}) {
    HashCache cache(nbytes);
    for (const std::uint64_t first : {1, 2, 1}) {
      for (const Extras& extras :
           {Extras{}, Extras{{0, extra}}, Extras{{0, other}}, Extras{{70, extra}, {190, extra}}}) {
        const auto tokens = tokens_from(first);
        CHECK(cache.hash_chain64("a", HashAlgorithm::kSha256Cbor, "parent", tokens, 2, extras) ==
              computed(tokens, extras));
        CHECK(cache.nbytes() <= nbytes);
      }
    }
  }
  HashCache cache(1 << 20);
  CHECK(cache.hash_chain64("a", HashAlgorithm::kXxhashCbor, "", {}, 1, {}).empty());
  CHECK_THROWS(std::invalid_argument, cache.hash_chain64("a", HashAlgorithm::kXxhashCbor, "", {}, 0, {}));
}

TEST(threads_share_looked_up_hashes) {
  HashCache cache(4 << 10);  // a few segments, so that they evict each other's
  std::vector<std::jthread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&cache] {
      for (std::uint64_t round = 0; round < 30; ++round) {
        const auto tokens = tokens_from(round % 3);
        CHECK(cache.hash_chain64("a", HashAlgorithm::kSha256Cbor, "parent", tokens, 2, {}) ==
              computed(tokens, {}));
      }
    });
  }
}

}  // namespace kvpool
