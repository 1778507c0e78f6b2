// How far local blocks reach, and the pool's part from there on. See table.h.
//
// As in kvpool's connector (kvpool/vllm/plan.py, longest_hit): the engine goes on from its own hit, so the pool
// matters from there; a whole-prefix group needs every later block in the pool, a sliding window its last ones.
#include <algorithm>
#include <numeric>

#include "index/table.h"

namespace kvpool {

void Table::add_loadable(Walk& walk, const PoolOf& pool_of, Matches& matches) const {
  struct Asked {
    std::uint32_t pool;   // a rank
    std::uint32_t local;  // blocks
    std::size_t row;
  };
  std::vector<Asked> asked;
  matches.loadable = matches.columns[static_cast<std::size_t>(Column::kLocal)];
  std::string_view last_name;
  constexpr std::uint32_t kNone = ~std::uint32_t{0};
  std::uint32_t pool = kNone;
  for (std::size_t row = 0; row < matches.loadable.size(); ++row) {
    const std::uint32_t local = matches.loadable[row];
    if (local == 0 || local == walk.count()) continue;
    const std::string_view name = pool_of(*matches.workers[row]);
    if (name.empty()) continue;
    if (name != last_name) {
      last_name = name;
      pool = kNone;
      const auto known = worker_by_name_.find(name);
      if (known != worker_by_name_.end() && !workers_[known->second].ranks.empty()) {
        pool = workers_[known->second].ranks.front();  // it has one
      }
    }
    if (pool != kNone && !ranks_[pool].holders.empty()) asked.push_back({pool, local, row});
  }
  std::ranges::sort(asked, [](const Asked& a, const Asked& b) {
    return a.pool != b.pool ? a.pool < b.pool : a.local < b.local;
  });
  const Asked* last = nullptr;
  std::uint64_t reached = 0;
  for (const Asked& one : asked) {
    // Within the run of the one before: without windows it ends at the same block.
    const bool is_within = last != nullptr && last->pool == one.pool &&
                           (last->local == one.local || (ranks_[one.pool].uniform && one.local <= reached));
    if (!is_within) reached = reach(ranks_[one.pool], one.local, walk);
    matches.loadable[one.row] = static_cast<std::uint32_t>(reached);
    last = &one;
  }
}

std::uint64_t Table::reach(const Rank& pool, std::uint64_t local, Walk& walk) const {
  Spans usable = {{local + 1, walk.count()}};
  std::uint64_t unit = 1;
  // Groups with the whole prefix come first: others are not read behind their end.
  for (const bool window : {false, true}) {
    for (const HolderId id : pool.holders) {
      const GroupHolder& holder = holders_[id];
      if ((holder.last != 0) != window) continue;
      unit = std::lcm(unit, std::uint64_t{holder.stride});
      if (unit > walk.count()) return local;
      keep_common(usable, held_in_pool(id, local, usable.back().last, walk));
      if (usable.empty()) return local;
    }
  }
  return std::max(local, longest(usable, unit));
}

// Lengths from which a group with the first `local` blocks could go on with the pool's, up to `bound` at least.
Spans Table::held_in_pool(HolderId id, std::uint64_t local, std::uint64_t bound, Walk& walk) const {
  constexpr std::uint64_t kLooks = 8;
  const GroupHolder& holder = holders_[id];
  SetRuns& runs = walk.runs(holder.stride);
  // The local blocks may end within a group's block: then all of it is needed.
  const std::uint64_t from = local / holder.stride;
  Spans spans;
  if (from >= runs.count()) return spans;
  std::uint64_t since = 0;
  bool was = false;
  for (std::size_t i = runs.index_of(from);; ++i) {
    const SetRuns::Run* const run = runs.at(i);
    const std::uint64_t begin = run == nullptr ? runs.count() : run->begin;
    const bool on = run != nullptr && begin * holder.stride < bound;
    if (on) walk.spend(kLooks);
    const bool is = on && (sets_.tiers(run->set, id) & tiers_of(Tier::kPool)) != 0;
    if (is && !was) since = begin;
    if (was && !is) {
      const std::uint64_t first = since <= from ? from + 1 : since + holder.last;
      if (first <= begin) spans.push_back({first * holder.stride, begin * holder.stride});
    }
    was = is;
    if (!on || (!is && holder.last == 0)) return spans;
  }
}

}  // namespace kvpool
