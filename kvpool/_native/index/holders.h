// Holders of blocks, and hash-consed sets of them. A block keeps its set's 32-bit number: it costs the same
// with 8 or 256 workers, and dropping a worker touches sets, not blocks.
//
// A holder is one KV-cache group of one data-parallel rank of one worker; a holding is a holder and its tiers.
//
// No locks: the owner has one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "index/flatmap.h"

namespace kvpool {

// The finalizer of splitmix64. Part of the digests' definition: replicas compare sums.
inline std::uint64_t mix(std::uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}
// Of a block, and of a further copy of it: their sums are equal in tables with equal blocks.
inline std::uint64_t digest_of(std::uint64_t hash) { return mix(hash + 0x9e3779b97f4a7c15ULL); }
inline std::uint64_t digest_of_copy(std::uint64_t hash) { return mix(hash + 0xd1b54a32d192ed03ULL); }

enum class Tier : std::uint8_t { kDevice, kHost, kDisk, kPool };
inline constexpr unsigned kTierCount = 4;

// One bit a tier.
using Tiers = std::uint8_t;
constexpr Tiers tiers_of(Tier tier) { return static_cast<Tiers>(1U << static_cast<unsigned>(tier)); }
inline constexpr Tiers kAllTiers = (1U << kTierCount) - 1;
inline constexpr Tiers kMemoryTiers = tiers_of(Tier::kDevice) | tiers_of(Tier::kHost);
inline constexpr Tiers kLocalTiers = tiers_of(Tier::kDevice) | tiers_of(Tier::kHost) | tiers_of(Tier::kDisk);

using HolderId = std::uint32_t;
inline constexpr HolderId kMaxHolders = 1U << 20;

// A holder and the tiers, at least one, in which it holds the block.
class Holding {
 public:
  Holding() = default;
  Holding(HolderId holder, unsigned tiers) : bits_(holder << kTierCount | tiers) {}
  HolderId holder() const { return bits_ >> kTierCount; }
  Tiers tiers() const { return bits_ & kAllTiers; }
  bool operator==(const Holding&) const = default;

 private:
  std::uint32_t bits_;
};

using SetId = std::uint32_t;
inline constexpr SetId kNobody = 0;

class HolderSets {
 public:
  explicit HolderSets(std::uint64_t seed);
  HolderSets(const HolderSets&) = delete;
  HolderSets& operator=(const HolderSets&) = delete;

  // By holder, rising. Empty for kNobody, and for a set whose holders were all dropped.
  std::span<const Holding> operator[](SetId set) const { return at(set).holdings(); }
  Tiers tiers(SetId set, HolderId holder) const;

  // The set that differs from `set` by one holder. It has no block yet: move() one there.
  SetId with(SetId set, HolderId holder, Tier tier);
  SetId without(SetId set, HolderId holder, Tier tier);
  // The set of exactly these holdings, at least one, by holder, rising. move() a block there.
  SetId of(std::span<const Holding> holdings);
  // Moves one block between sets, kNobody included. A set without blocks is freed.
  void move(SetId from, SetId to);

  // Removes the tiers in `gone`, by holder, from every set; returns how many blocks lost their last holder.
  // Their sets stay, empty, until move() takes the last block away.
  std::size_t drop(std::span<const Tiers> gone);

  std::size_t size() const { return size_; }
  // Every SetId is below this.
  SetId limit() const { return used_; }
  std::size_t nbytes() const;

 private:
  static constexpr unsigned kInPlace = 2;
  static constexpr std::size_t kChunkSets = 1024;
  static constexpr std::size_t kMemos = 1024;

  struct Set {
    std::span<const Holding> holdings() const { return {many ? many.get() : few, count}; }

    std::uint64_t digest = 0;      // of the holdings: a sum, changed with them
    std::uint32_t blocks = 0;      // of this set; 0: free
    std::uint32_t generation = 0;  // +1 each time this number is freed: invalidates older memos
    std::uint32_t count = 0;
    std::uint32_t many_count = 0;  // capacity of `many`
    bool interned = false;         // found by its digest; false where drop() made it equal to another set
    Holding few[kInPlace];
    std::unique_ptr<Holding[]> many;
    SetId next_free = kNobody;
  };

  // Recent with() and without(): blocks of one prompt take the same step in a row.
  struct Memo {
    SetId from = kNobody;
    SetId to = kNobody;
    std::uint32_t from_generation = 0;
    std::uint32_t to_generation = 0;
    std::uint32_t step = ~0U;
  };

  Set& at(SetId set) { return chunks_[set / kChunkSets][set % kChunkSets]; }
  const Set& at(SetId set) const { return chunks_[set / kChunkSets][set % kChunkSets]; }
  std::uint64_t digest_of(Holding holding) const;
  SetId changed(SetId set, HolderId holder, Tier tier, bool add);
  SetId intern(std::span<const Holding> holdings, std::uint64_t digest);
  SetId allocate();
  void fill(Set& set, std::span<const Holding> holdings);
  void release_many(Set& set);
  void unintern(SetId set);
  void free(SetId set);

  std::uint64_t seed_;
  std::vector<std::unique_ptr<Set[]>> chunks_;
  SetId used_ = 0;  // numbers ever used
  SetId free_ = kNobody;
  std::size_t size_ = 0;
  std::size_t many_nbytes_ = 0;
  FlatMap by_digest_;
  std::vector<Memo> memos_;
  std::vector<Holding> scratch_;
};

}  // namespace kvpool
