// Digests of blocks and of their further copies: their sums are equal in tables with equal blocks.
#pragma once

#include <cstdint>

namespace kvpool {

// The finalizer of splitmix64. Part of the digest's definition: replicas compare sums.
inline std::uint64_t mix(std::uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}
inline std::uint64_t digest_of(std::uint64_t hash) { return mix(hash + 0x9e3779b97f4a7c15ULL); }
inline std::uint64_t digest_of_copy(std::uint64_t hash) { return mix(hash + 0xd1b54a32d192ed03ULL); }

}  // namespace kvpool
