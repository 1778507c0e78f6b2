// Content and totals of a table. See table.h.

#include "index/digests.h"
#include "index/table.h"

namespace kvpool {
namespace {

void add(const TierBlocks& blocks, TierBlocks& sum) {
  for (std::size_t tier = 0; tier < kTierCount; ++tier) sum[tier] += blocks[tier];
}

}  // namespace

Applied& Applied::operator+=(const Applied& other) {
  stored += other.stored;
  copied += other.copied;
  repeated += other.repeated;
  removed += other.removed;
  uncopied += other.uncopied;
  unknown += other.unknown;
  refused += other.refused;
  doubted += other.doubted;
  cleared_events += other.cleared_events;
  skipped_events += other.skipped_events;
  evicted += other.evicted;
  lookahead_events += other.lookahead_events;
  return *this;
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
  const auto known = worker_by_name_.find(worker);
  if (known == worker_by_name_.end()) return blocks;
  for (const std::uint32_t rank : workers_[known->second].ranks) {
    for (const HolderId holder : ranks_[rank].holders) add(holders_[holder].blocks, blocks);
  }
  return blocks;
}

std::optional<Content> Table::content(std::string_view worker) const {
  const auto held = read();
  const auto known = worker_by_name_.find(worker);
  if (known == worker_by_name_.end()) return std::nullopt;
  Content content;
  for (const std::uint32_t rank : workers_[known->second].ranks) {
    for (const HolderId holder : ranks_[rank].holders) {
      for (unsigned tier = 0; tier < kTierCount; ++tier) {
        if (holders_[holder].blocks[tier] == 0) continue;
        const std::uint64_t where =
            (std::uint64_t{ranks_[rank].dp_rank} << 16 | holders_[holder].group) << 2 | tier;
        content.digest += mix(holders_[holder].digests[tier] ^ mix(where + 1));
        content.blocks += holders_[holder].blocks[tier];
      }
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

}  // namespace kvpool
