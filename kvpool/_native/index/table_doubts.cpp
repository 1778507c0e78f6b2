// Mark and sweep. See table.h.

#include "index/table.h"

namespace kvpool {

std::uint64_t Table::doubt(std::string_view worker, std::uint64_t cursor) {
  const auto held = write();
  const std::vector<HolderId> holders = holders_of(worker);
  if (holders.empty()) return 0;
  if (cursor == 0) {
    for (const HolderId holder : holders) {
      let_go(holders_[holder], tiers_of(Tier::kPool));
      holders_[holder].doubts = std::make_unique<Doubts>(random_seed());
      holders_nbytes_ += holders_[holder].doubts->blocks.nbytes();
    }
  }
  blocks_.visit_segment(cursor, [&](std::uint64_t hash, SetId set) {
    for (const HolderId holder : holders) {
      // A holder without marks joined, or was cleared, since the round began: its blocks are newer.
      if (!holders_[holder].doubts || (sets_.tiers(set, holder) & tiers_of(Tier::kPool)) == 0) continue;
      // Even above the memory limit: an unmarked block would be credited for good.
      FlatMap& doubted = holders_[holder].doubts->blocks;
      const std::size_t nbytes_before = doubted.nbytes();
      doubted.insert(hash, 0);
      holders_nbytes_ += doubted.nbytes() - nbytes_before;
    }
  });
  account();
  return cursor;
}

std::pair<std::size_t, std::size_t> Table::expel(std::string_view worker) {
  const auto held = write();
  Applied applied;
  std::size_t left = 0;
  EventBatch doubted;
  for (const HolderId holder : holders_of(worker)) {
    Doubts* const doubts = holders_[holder].doubts.get();
    if (doubts == nullptr) continue;
    doubted.hashes.clear();
    doubts->blocks.visit_segment(doubts->cursor,
                                 [&](std::uint64_t hash, std::uint32_t) { doubted.hashes.push_back(hash); });
    const std::size_t count = doubted.hashes.size();
    remove(holder, doubted, {Event::Kind::kRemoved, Tier::kPool, Reach::kUnsaid, false, 0, 0, count},
           applied);
    for (const std::uint64_t hash : doubted.hashes) doubts->blocks.erase(hash);
    left += doubts->blocks.size();
    if (doubts->blocks.size() == 0) let_go(holders_[holder], tiers_of(Tier::kPool));
  }
  account();
  total_.removed += applied.removed;
  return {applied.removed, left};
}

}  // namespace kvpool
