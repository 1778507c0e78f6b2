// `HashCache`: hashes of prompts by their leading tokens. A prompt that extends an earlier one hashes only its new
// blocks: SHA-256 of 142,000 tokens takes 2 ms, a look at them 0.2.
//
// Hashes are kept in segments of kSegmentBlocks blocks. A segment's key is XXH3-128, with a random seed, of all that its
// hashes depend on: owner, algorithm, parent, block size, and tokens and extra keys up to its end. Least recently used
// segments go first.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "key/hashing.h"

namespace kvpool {

// Any thread; nothing is hashed under the lock.
class HashCache {
 public:
  static constexpr std::size_t kSegmentBlocks = 64;

  explicit HashCache(std::size_t max_nbytes);

  // `low_words` of `hash_chain`. `owner`: others' segments are as good as unknown.
  std::vector<std::uint64_t> hash_chain64(std::string_view owner, HashAlgorithm algorithm,
                                          std::string_view parent, std::span<const std::uint64_t> token_ids,
                                          std::size_t block_tokens, const Extras& extras);

  // Of memory: at most `max_nbytes`.
  std::size_t nbytes() const;

 private:
  struct Key {
    std::uint64_t low, high;
    bool operator==(const Key&) const = default;
  };
  struct LowBits {
    std::size_t operator()(const Key& key) const { return key.low; }
  };
  // `last`: the digest of the last block, which the next one begins with.
  struct Segment {
    std::array<std::uint64_t, kSegmentBlocks> words;
    std::array<std::byte, kMaxDigestNbytes> last;
  };
  struct Entry {
    Key key;
    Segment segment;
  };
  class Prefix;

  // Of memory: with the links of the list, a node and a bucket of the map, and the allocator's own.
  static constexpr std::size_t kEntryNbytes = sizeof(Entry) + 96;

  std::optional<Segment> find(const Key& key);
  void keep(const Key& key, const Segment& segment);

  const std::size_t most_;
  const std::uint64_t seed_;
  mutable std::mutex mutex_;  // guards what follows
  std::list<Entry> entries_;  // the last used first
  std::unordered_map<Key, std::list<Entry>::iterator, LowBits> by_key_;
};

}  // namespace kvpool
