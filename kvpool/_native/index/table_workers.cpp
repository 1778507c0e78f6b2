// Workers, ranks and groups of a table, and their totals. See table.h.
#include <algorithm>
#include <stdexcept>

#include "index/table.h"

namespace kvpool {
namespace {

template <typename Thing>
std::uint32_t take_place(std::vector<Thing>& things, std::vector<std::uint32_t>& free) {
  if (!free.empty()) {
    const std::uint32_t place = free.back();
    free.pop_back();
    return place;
  }
  things.emplace_back();
  free.reserve(things.capacity());  // so that giving back never allocates
  return static_cast<std::uint32_t>(things.size() - 1);
}

void add(const TierBlocks& blocks, TierBlocks& sum) {
  for (std::size_t tier = 0; tier < kTierCount; ++tier) sum[tier] += blocks[tier];
}

}  // namespace

std::uint32_t Table::worker_of(std::string_view name) {
  if (name.empty() || name.size() > kMaxWorkerNbytes) {
    throw std::invalid_argument("a worker's name has 1 to 256 bytes");
  }
  const auto known = worker_by_name_.find(name);
  if (known != worker_by_name_.end()) return known->second;
  if (worker_by_name_.size() >= kMaxWorkers) throw std::invalid_argument("there are 65536 workers already");
  auto text = std::make_shared<const std::string>(name);
  const std::uint32_t worker = take_place(workers_, free_workers_);
  workers_[worker].name = std::move(text);
  worker_by_name_.emplace(name, worker);
  return worker;
}

std::optional<std::uint32_t> Table::rank_of(std::uint32_t worker, std::uint32_t dp_rank) {
  for (const std::uint32_t rank : workers_[worker].ranks) {
    if (ranks_[rank].dp_rank == dp_rank) return rank;
  }
  if (workers_[worker].ranks.size() >= kMaxRanks) return std::nullopt;
  workers_[worker].ranks.reserve(workers_[worker].ranks.size() + 1);
  const std::uint32_t rank = take_place(ranks_, free_ranks_);
  ranks_[rank] = {worker, dp_rank, {}, true};
  workers_[worker].ranks.push_back(rank);
  return rank;
}

std::optional<HolderId> Table::known_holder(std::uint32_t worker, std::uint32_t dp_rank,
                                            std::uint32_t group) const {
  for (const std::uint32_t rank : workers_[worker].ranks) {
    if (ranks_[rank].dp_rank != dp_rank) continue;
    for (const HolderId holder : ranks_[rank].holders) {
      if (holders_[holder].group == group) return holder;
    }
  }
  return std::nullopt;
}

std::optional<HolderId> Table::holder_of(std::uint32_t worker, std::uint32_t dp_rank, std::uint32_t group) {
  if (const auto known = known_holder(worker, dp_rank, group)) return known;
  const std::optional<std::uint32_t> rank = rank_of(worker, dp_rank);
  if (!rank) return std::nullopt;
  if (ranks_[*rank].holders.size() >= kMaxGroups) return std::nullopt;
  if (holders_.size() >= kMaxHolders && free_holders_.empty()) return std::nullopt;
  ranks_[*rank].holders.reserve(ranks_[*rank].holders.size() + 1);
  const HolderId holder = take_place(holders_, free_holders_);
  holders_[holder] = GroupHolder{};
  holders_[holder].rank = *rank;
  holders_[holder].group = group;
  holders_[holder].in_use = true;
  holders_[holder].uniform = ranks_[*rank].uniform;
  ranks_[*rank].holders.push_back(holder);
  return holder;
}

std::vector<HolderId> Table::holders_of(std::string_view worker) const {
  const auto known = worker_by_name_.find(worker);
  if (known == worker_by_name_.end()) return {};
  return holders_of(workers_[known->second].ranks);
}

std::vector<HolderId> Table::holders_of(std::span<const std::uint32_t> ranks) const {
  std::vector<HolderId> holders;
  for (const std::uint32_t rank : ranks) {
    holders.insert(holders.end(), ranks_[rank].holders.begin(), ranks_[rank].holders.end());
  }
  return holders;
}

bool Table::learn_group(HolderId id, const Event& event) {
  GroupHolder& holder = holders_[id];
  bool dropped = false;
  const std::uint32_t stride = holder.stride;
  const std::uint32_t needed = holder.last;
  // A prompt's end may be reported in smaller pieces, so a group's blocks are as large as the largest.
  if (block_tokens_ != 0 && event.block_tokens % block_tokens_ == 0) {
    holder.stride = std::max(holder.stride, event.block_tokens / block_tokens_);
  }
  if (event.reach != Reach::kUnsaid) {
    const bool partial = event.reach != Reach::kWhole;
    std::uint32_t last = event.reach == Reach::kState ? 1 : 0;
    if (event.reach == Reach::kWindow) {
      // As vLLM's SlidingWindowManager: the next token's window, but at least one block.
      last = holder.last;
      if (event.window_tokens != 0 && event.block_tokens != 0) {
        last = std::max(1U, (event.window_tokens - 1 + event.block_tokens - 1) / event.block_tokens);
      }
    }
    if (partial != holder.partial || last != holder.last) {
      holder.partial = partial;
      holder.last = last;
      // Credits of the group under a former kind.
      dropped = drop(std::span(&id, 1), tiers_of(Tier::kDevice));
    }
  }
  if (holder.stride != stride || holder.last != needed) learn_uniform(holder.rank);
  return dropped;
}

void Table::learn_uniform(std::uint32_t id) {
  Rank& rank = ranks_[id];
  const bool uniform = std::ranges::all_of(
      rank.holders, [this](HolderId one) { return holders_[one].last == 0 && holders_[one].stride == 1; });
  if (uniform == rank.uniform) return;
  rank.uniform = uniform;
  hybrid_ranks_ = uniform ? hybrid_ranks_ - 1 : hybrid_ranks_ + 1;
  for (const HolderId one : rank.holders) holders_[one].uniform = uniform;
}

bool Table::drop(std::span<const HolderId> holders, Tiers tiers) {
  bool anything = false;
  for (const HolderId id : holders) {
    // With all its blocks gone, later ones are complete again.
    if ((tiers & kLocalTiers) == kLocalTiers) holders_[id].evicted = 0;
    for (unsigned tier = 0; tier < kTierCount; ++tier) {
      anything = anything || ((tiers >> tier & 1U) != 0 && holders_[id].blocks[tier] != 0);
    }
  }
  // Skips the walk over all sets for a publisher of empty clears.
  if (!anything) return false;
  std::vector<Tiers> gone(holders_.size());
  for (const HolderId id : holders) gone[id] = tiers;
  held_ -= sets_.drop(gone);
  for (const HolderId id : holders) {
    for (unsigned tier = 0; tier < kTierCount; ++tier) {
      if ((tiers >> tier & 1U) != 0) holders_[id].blocks[tier] = holders_[id].digests[tier] = 0;
    }
    let_go(holders_[id], tiers);
  }
  return true;
}

// A holder's data beside its blocks of these tiers.
void Table::let_go(GroupHolder& holder, Tiers tiers) {
  if (holder.more_copies && (tiers & tiers_of(Tier::kDevice)) != 0) {
    holders_nbytes_ -= holder.more_copies->nbytes();
    holder.more_copies.reset();
  }
  if (holder.marks && (tiers & tiers_of(Tier::kPool)) != 0) {
    holders_nbytes_ -= holder.marks->blocks.nbytes();
    holder.marks.reset();
  }
}

bool Table::clear(std::string_view worker, std::optional<std::uint32_t> dp_rank, Tiers tiers) {
  const auto held = write();
  const auto known = worker_by_name_.find(worker);
  if (known == worker_by_name_.end()) return false;
  std::vector<std::uint32_t> ranks;
  for (const std::uint32_t rank : workers_[known->second].ranks) {
    if (!dp_rank || ranks_[rank].dp_rank == *dp_rank) ranks.push_back(rank);
  }
  drop(holders_of(ranks), tiers);
  account();
  return !ranks.empty();
}

bool Table::remove_worker(std::string_view worker) {
  const auto held = write();
  const auto known = worker_by_name_.find(worker);
  if (known == worker_by_name_.end()) return false;
  const std::uint32_t place = known->second;
  drop(holders_of(workers_[place].ranks), kAllTiers);
  // No allocation from here on. Numbers may be reused: no set names them any more.
  for (const std::uint32_t rank : workers_[place].ranks) {
    for (const HolderId holder : ranks_[rank].holders) {
      let_go(holders_[holder], kAllTiers);
      holders_[holder] = GroupHolder{};
      free_holders_.push_back(holder);
    }
    if (!ranks_[rank].uniform) --hybrid_ranks_;
    ranks_[rank] = Rank{};
    free_ranks_.push_back(rank);
  }
  workers_[place] = Worker{};
  free_workers_.push_back(place);
  worker_by_name_.erase(known);
  account();
  return true;
}

std::uint64_t Table::evicted(std::string_view worker) const {
  const auto held = read();
  std::uint64_t evicted = 0;
  for (const HolderId holder : holders_of(worker)) evicted += holders_[holder].evicted;
  return evicted;
}

std::vector<std::string> Table::workers() const {
  const auto held = read();
  std::vector<std::string> names;
  names.reserve(worker_by_name_.size());
  for (const auto& [name, worker] : worker_by_name_) names.push_back(name);
  return names;
}

TierBlocks Table::held_by(std::string_view worker) const {
  const auto held = read();
  TierBlocks blocks{};
  for (const HolderId holder : holders_of(worker)) add(holders_[holder].blocks, blocks);
  return blocks;
}

std::optional<Content> Table::content(std::string_view worker) const {
  const auto held = read();
  if (!worker_by_name_.contains(worker)) return std::nullopt;
  Content content;
  for (const HolderId id : holders_of(worker)) {
    const GroupHolder& holder = holders_[id];
    for (unsigned tier = 0; tier < kTierCount; ++tier) {
      if (holder.blocks[tier] == 0) continue;
      const std::uint64_t where =
          (std::uint64_t{ranks_[holder.rank].dp_rank} << 16 | holder.group) << 2 | tier;
      content.digest += mix(holder.digests[tier] ^ mix(where + 1));
      content.blocks += holder.blocks[tier];
    }
  }
  return content;
}

TableStats Table::stats() const {
  const auto held = read();
  TableStats stats;
  stats.applied = total_;
  stats.batches = batches_;
  stats.blocks = held_;
  stats.holder_sets = sets_.size();
  stats.workers = worker_by_name_.size();
  stats.unswept = blocks_.size() - held_;
  stats.nbytes = nbytes();
  for (const GroupHolder& holder : holders_) {
    if (holder.in_use) {
      ++stats.holders;
      add(holder.blocks, stats.tier_blocks);
    }
    if (holder.more_copies) stats.copies += holder.more_copies->size();
  }
  return stats;
}

void Table::add_to_total(const Applied& applied) {
  for (const auto field : kAppliedFields) total_.*field += applied.*field;
}

}  // namespace kvpool
