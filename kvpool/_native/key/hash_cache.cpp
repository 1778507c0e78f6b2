// Block hashes that are looked up.
#include "key/hash_cache.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <stdexcept>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvpool {
namespace {

std::uint64_t draw_seed() {
  std::random_device device;
  return (std::uint64_t{device()} << 32) | device();
}

}  // namespace

// What a prompt's hashes depend on, up to a block. Each part's length comes before it.
class HashCache::Prefix {
 public:
  Prefix(std::uint64_t seed, std::string_view owner, HashAlgorithm algorithm, std::string_view parent,
         std::size_t block_tokens) {
    XXH3_INITSTATE(&state_);
    XXH3_128bits_reset_withSeed(&state_, seed);
    add(owner);
    add(parent);
    add_number(static_cast<std::uint64_t>(algorithm));
    add_number(block_tokens);
  }

  // The key of the segment that ends behind these tokens.
  Key key(std::span<const std::uint64_t> token_ids, const Extras& extras) {
    add_number(extras.size());
    for (const auto& [block, extra] : extras) {
      add_number(block);
      add(extra);
    }
    XXH3_128bits_update(&state_, token_ids.data(), token_ids.size_bytes());
    const XXH128_hash_t hash = XXH3_128bits_digest(&state_);
    return {hash.low64, hash.high64};
  }

 private:
  void add_number(std::uint64_t number) { XXH3_128bits_update(&state_, &number, sizeof number); }
  void add(std::string_view text) {
    add_number(text.size());
    XXH3_128bits_update(&state_, text.data(), text.size());
  }

  XXH3_state_t state_;
};

HashCache::HashCache(std::size_t max_nbytes) : most_(max_nbytes / kEntryNbytes), seed_(draw_seed()) {}

std::vector<std::uint64_t> HashCache::hash_chain64(std::string_view owner, HashAlgorithm algorithm,
                                                   std::string_view parent,
                                                   std::span<const std::uint64_t> token_ids,
                                                   std::size_t block_tokens, const Extras& extras) {
  if (block_tokens == 0) throw std::invalid_argument("block_tokens must be at least 1");
  const std::size_t blocks = token_ids.size() / block_tokens;
  std::vector<std::uint64_t> words;
  words.reserve(blocks);
  Prefix prefix(seed_, owner, algorithm, parent, block_tokens);
  std::string previous(parent);
  auto extra = extras.begin();
  for (std::size_t first = 0; first < blocks; first += kSegmentBlocks) {
    const std::size_t count = std::min(kSegmentBlocks, blocks - first);
    const auto tokens = token_ids.subspan(first * block_tokens, count * block_tokens);
    Extras own;
    for (; extra != extras.end() && extra->first < first + count; ++extra)
      own.emplace_back(extra->first - first, extra->second);
    const bool is_whole = count == kSegmentBlocks;
    const Key key = is_whole ? prefix.key(tokens, own) : Key{};
    std::optional<Segment> segment = is_whole ? find(key) : std::nullopt;
    if (!segment) {
      const std::vector<std::byte> digests = hash_chain(algorithm, previous, tokens, block_tokens, own);
      const std::vector<std::uint64_t> made = low_words(algorithm, digests);
      segment.emplace();
      std::ranges::copy(made, segment->words.begin());
      const std::size_t nbytes = digest_nbytes(algorithm);
      std::memcpy(segment->last.data(), digests.data() + digests.size() - nbytes, nbytes);
      if (is_whole) keep(key, *segment);
    }
    words.insert(words.end(), segment->words.begin(),
                 segment->words.begin() + static_cast<std::ptrdiff_t>(count));
    previous.assign(reinterpret_cast<const char*>(segment->last.data()), digest_nbytes(algorithm));
  }
  return words;
}

std::size_t HashCache::nbytes() const {
  const std::lock_guard lock(mutex_);
  return entries_.size() * kEntryNbytes;
}

std::optional<HashCache::Segment> HashCache::find(const Key& key) {
  const std::lock_guard lock(mutex_);
  const auto found = by_key_.find(key);
  if (found == by_key_.end()) return std::nullopt;
  entries_.splice(entries_.begin(), entries_, found->second);
  return found->second->segment;
}

void HashCache::keep(const Key& key, const Segment& segment) {
  const std::lock_guard lock(mutex_);
  if (most_ == 0 || by_key_.contains(key)) return;
  if (entries_.size() == most_) {
    by_key_.erase(entries_.back().key);
    entries_.pop_back();
  }
  entries_.push_front({key, segment});
  by_key_.emplace(key, entries_.begin());
}

}  // namespace kvpool
