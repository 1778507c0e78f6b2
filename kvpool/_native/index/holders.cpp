#include "index/holders.h"

#include <algorithm>
#include <new>
#include <stdexcept>

namespace kvpool {
namespace {

// The allocator's own part of each array, about.
constexpr std::size_t kAllocationNbytes = 16;

}  // namespace

HolderSets::HolderSets(std::uint64_t seed) : seed_(seed), by_digest_(seed), memos_(kMemos) {
  allocate();  // kNobody
  size_ = 0;
}

Tiers HolderSets::tiers(SetId set, HolderId holder) const {
  const auto holdings = at(set).holdings();
  const auto found = std::ranges::lower_bound(holdings, holder, {}, &Holding::holder);
  return found != holdings.end() && found->holder() == holder ? found->tiers() : Tiers{0};
}

SetId HolderSets::with(SetId set, HolderId holder, Tier tier) { return changed(set, holder, tier, true); }
SetId HolderSets::without(SetId set, HolderId holder, Tier tier) { return changed(set, holder, tier, false); }

std::uint64_t HolderSets::digest_of(Holding holding) const {
  return mix(seed_ + holding.holder() * std::uint64_t{kAllTiers + 1} + holding.tiers());
}

SetId HolderSets::changed(SetId set, HolderId holder, Tier tier, bool add) {
  const std::uint32_t step = holder << 3 | static_cast<std::uint32_t>(tier) << 1 | (add ? 1U : 0U);
  const std::uint32_t slot = (set * 0x9e3779b1U ^ step * 0x85ebca77U) >> 16;
  Memo& memo = memos_[slot % kMemos];
  if (memo.from == set && memo.step == step && memo.from_generation == at(set).generation &&
      memo.to_generation == at(memo.to).generation) {
    return memo.to;
  }

  const auto before = at(set).holdings();
  const auto found = std::ranges::lower_bound(before, holder, {}, &Holding::holder);
  const bool present = found != before.end() && found->holder() == holder;
  const unsigned old_tiers = present ? found->tiers() : 0U;
  const unsigned new_tiers = add ? old_tiers | tiers_of(tier) : old_tiers & ~unsigned{tiers_of(tier)};
  if (old_tiers == new_tiers) return set;

  std::uint64_t digest = at(set).digest;
  scratch_.assign(before.begin(), found);
  if (new_tiers != 0) {
    scratch_.emplace_back(holder, new_tiers);
    digest += digest_of(scratch_.back());
  }
  if (present) digest -= digest_of(*found);
  scratch_.insert(scratch_.end(), present ? found + 1 : found, before.end());

  const SetId to = scratch_.empty() ? kNobody : intern(scratch_, digest);
  memo = {set, to, at(set).generation, at(to).generation, step};
  return to;
}

SetId HolderSets::of(std::span<const Holding> holdings) {
  std::uint64_t digest = 0;
  for (const Holding holding : holdings) digest += digest_of(holding);
  return intern(holdings, digest);
}

SetId HolderSets::intern(std::span<const Holding> holdings, std::uint64_t digest) {
  const std::uint32_t* known = by_digest_.find(digest);
  if (known != nullptr && std::ranges::equal(at(*known).holdings(), holdings)) return *known;
  const SetId fresh = allocate();
  Set& set = at(fresh);
  try {
    fill(set, holdings);
    set.digest = digest;
    // A second set with an equal digest is never found, and costs memory only.
    set.interned = known == nullptr && by_digest_.insert(digest, fresh).second;
  } catch (...) {
    free(fresh);
    throw;
  }
  return fresh;
}

SetId HolderSets::allocate() {
  SetId set = free_;
  if (set != kNobody) {
    free_ = at(set).next_free;
  } else {
    if (used_ == ~SetId{0}) throw std::length_error("more sets of holders than can be numbered");
    if (used_ == chunks_.size() * kChunkSets) chunks_.push_back(std::make_unique<Set[]>(kChunkSets));
    set = used_++;
  }
  ++size_;
  return set;
}

void HolderSets::fill(Set& set, std::span<const Holding> holdings) {
  std::unique_ptr<Holding[]> many;
  if (holdings.size() > kInPlace) many = std::make_unique<Holding[]>(holdings.size());
  std::ranges::copy(holdings, many ? many.get() : set.few);
  release_many(set);
  set.count = static_cast<std::uint32_t>(holdings.size());
  if (!many) return;
  set.many = std::move(many);
  set.many_count = set.count;
  many_nbytes_ += set.many_count * sizeof(Holding) + kAllocationNbytes;
}

void HolderSets::release_many(Set& set) {
  if (!set.many) return;
  many_nbytes_ -= set.many_count * sizeof(Holding) + kAllocationNbytes;
  set.many.reset();
  set.many_count = 0;
}

void HolderSets::unintern(SetId set) {
  if (!at(set).interned) return;
  by_digest_.erase(at(set).digest);
  at(set).interned = false;
}

void HolderSets::free(SetId set) {
  unintern(set);
  Set& freed = at(set);
  fill(freed, {});
  freed.digest = 0;
  freed.blocks = 0;
  ++freed.generation;
  freed.next_free = free_;
  free_ = set;
  --size_;
}

void HolderSets::move(SetId from, SetId to) {
  if (to != kNobody) ++at(to).blocks;
  if (from != kNobody && --at(from).blocks == 0) free(from);
}

std::size_t HolderSets::drop(std::span<const Tiers> gone) {
  std::size_t orphaned = 0;
  for (SetId id = kNobody + 1; id < used_; ++id) {
    Set& set = at(id);
    const auto before = set.holdings();
    const auto hit = [&](Holding holding) { return (holding.tiers() & gone[holding.holder()]) != 0; };
    if (std::ranges::none_of(before, hit)) continue;

    // In place, so that no allocation can fail half way.
    unintern(id);
    Holding* const all = set.many ? set.many.get() : set.few;
    std::uint32_t left = 0;
    set.digest = 0;
    for (std::uint32_t i = 0; i < set.count; ++i) {
      const unsigned tiers = all[i].tiers() & ~unsigned{gone[all[i].holder()]};
      if (tiers == 0) continue;
      all[left] = Holding(all[i].holder(), tiers);
      set.digest += digest_of(all[left++]);
    }
    set.count = left;
    if (left <= kInPlace && set.many) {
      std::copy_n(all, left, set.few);
      release_many(set);
    }
    if (left == 0) {
      orphaned += set.blocks;
    } else {
      try {
        set.interned = by_digest_.insert(set.digest, id).second;
      } catch (const std::bad_alloc&) {
        set.interned = false;
      }
    }
  }
  memos_.assign(kMemos, Memo{});
  return orphaned;
}

std::size_t HolderSets::nbytes() const {
  return sizeof *this - sizeof by_digest_ + chunks_.size() * kChunkSets * sizeof(Set) +
         chunks_.capacity() * sizeof(chunks_[0]) + many_nbytes_ + by_digest_.nbytes() +
         memos_.capacity() * sizeof(Memo) + scratch_.capacity() * sizeof(Holding);
}

}  // namespace kvpool
