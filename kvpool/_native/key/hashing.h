// vLLM's block-hash chain, bit for bit:
//   h[i] = H(canonical CBOR of (h[i-1], (token ids of block i), extra keys or null))
// (hash_block_tokens in vllm/v1/core/kv_cache_utils.py, sha256_cbor and xxhash_cbor in
// vllm/utils/hashing.py).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvpool {

enum class HashAlgorithm { kSha256Cbor, kXxhashCbor };

// Throws std::invalid_argument for any other name.
HashAlgorithm parse_algorithm(std::string_view name);

constexpr std::size_t kMaxDigestNbytes = 32;
std::size_t digest_nbytes(HashAlgorithm algorithm);

// (index of a block, its extra keys as CBOR), ascending by index.
using Extras = std::vector<std::pair<std::uint64_t, std::string_view>>;

// The digests of all full blocks in order. Trailing tokens are ignored.
std::vector<std::byte> hash_chain(HashAlgorithm algorithm, std::string_view parent,
                                  std::span<const std::uint64_t> token_ids, std::size_t block_tokens,
                                  const Extras& extras);

// The hashes in KV events: the last 8 bytes of each digest, read big-endian.
std::vector<std::uint64_t> low_words(HashAlgorithm algorithm, std::span<const std::byte> digests);

std::string digest(HashAlgorithm algorithm, std::span<const std::byte> data);

}  // namespace kvpool
