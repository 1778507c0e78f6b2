// Leading blocks of a prompt by rank. See table.h.
#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

#include "index/table.h"

namespace kvpool {
namespace {

static_assert(std::endian::native == std::endian::little, "hashes arrive as packed little-endian integers");

constexpr std::array<Tiers, kColumnCount> kColumnTiers = {
    tiers_of(Tier::kDevice),
    tiers_of(Tier::kHost),
    tiers_of(Tier::kDisk),
    tiers_of(Tier::kPool),
    kLocalTiers,
    kAllTiers,
    kMemoryTiers,
};

// Bit c: a block in these tiers counts for column c.
using Columns = std::uint8_t;
constexpr std::array<Columns, kAllTiers + 1> kColumnsOf = [] {
  std::array<Columns, kAllTiers + 1> columns{};
  for (unsigned tiers = 0; tiers <= kAllTiers; ++tiers) {
    for (unsigned column = 0; column < kColumnCount; ++column) {
      if ((tiers & kColumnTiers[column]) != 0)
        columns[tiers] = static_cast<Columns>(columns[tiers] | 1U << column);
    }
  }
  return columns;
}();

using Counts = std::array<std::uint32_t, kColumnCount>;

// A holder while a prompt is walked along.
struct Runner {
  HolderId holder;
  Columns running;  // columns whose run has not ended
  std::uint32_t result;
};

struct Result {
  std::uint32_t rank;
  Counts blocks;
};

// A search for one holder in a set, where a walk along both takes a look each.
constexpr std::uint64_t kLooksOfSearch = 8;

// Recently processed sets of a prompt: runners only stop, so a second time changes nothing. A pool that lost
// every other block of a thousand workers costs two passes then, not one a block.
class Taken {
 public:
  // Whether this is the first time, as far as remembered.
  bool is_first(SetId set) {
    SetId& last = sets_[set % sets_.size()];
    const bool is_first = set == kNobody || last != set;
    last = set;
    return is_first;
  }

 private:
  std::array<SetId, 64> sets_{};
};

}  // namespace

Matches Table::match(std::span<const std::byte> hashes, const std::vector<std::string_view>* workers,
                     const PoolOf& pool_of, Patience patience, const PoolOf& near_of) const {
  Matches matches;
  if (hashes.size() < sizeof(std::uint64_t)) return matches;
  check_circles(hashes);
  const auto held = read(patience);
  std::vector<bool> wanted;
  if (workers != nullptr) {
    wanted.resize(workers_.size());
    for (const std::string_view name : *workers) {
      const auto known = worker_by_name_.find(name);
      if (known != worker_by_name_.end()) wanted[known->second] = true;
    }
  }
  Walk walk(blocks_, hashes, patience);
  match_uniform(walk, workers == nullptr ? nullptr : &wanted, matches);
  if (hybrid_ranks_ != 0) match_hybrid(walk, workers == nullptr ? nullptr : &wanted, matches);
  if (pool_of) matches.loadable = loadable(walk, pool_of, matches);
  if (near_of) matches.near = loadable(walk, near_of, matches);
  return matches;
}

std::vector<bool> Table::pooled(std::string_view worker, std::span<const std::byte> hashes,
                                Patience patience) const {
  std::vector<bool> found(hashes.size() / sizeof(std::uint64_t));
  const auto lock = read(patience);
  const std::vector<HolderId> holders = holders_of(worker);
  for (std::size_t i = 0; i < found.size() && !holders.empty(); ++i) {
    std::uint64_t hash;
    std::memcpy(&hash, hashes.data() + i * sizeof(hash), sizeof(hash));
    const std::uint32_t* const set = blocks_.touch(blocks_.prefetch(hash), hash);
    found[i] = set != nullptr && std::ranges::any_of(holders, [&](HolderId holder) {
                 return (sets_.tiers(*set, holder) & tiers_of(Tier::kPool)) != 0;
               });
  }
  return found;
}

void Table::match_uniform(Walk& walk, const std::vector<bool>* wanted, Matches& matches) const {
  std::vector<Runner> runners;
  std::vector<Result> results;
  Taken taken;
  SetRuns& runs = walk.runs(1);
  const SetId first = runs.at(0)->set;
  taken.is_first(first);
  walk.spend(sets_[first].size());
  for (const Holding holding : sets_[first]) {
    const GroupHolder& holder = holders_[holding.holder()];
    if (!holder.uniform || (wanted != nullptr && !(*wanted)[ranks_[holder.rank].worker])) continue;
    runners.push_back(
        {holding.holder(), kColumnsOf[holding.tiers()], static_cast<std::uint32_t>(results.size())});
    results.push_back({holder.rank, {}});
  }

  for (std::size_t i = 1; !runners.empty(); ++i) {
    const SetRuns::Run* const run = runs.at(i);
    if (run == nullptr) break;
    if (!taken.is_first(run->set)) continue;
    const std::uint64_t reached = run->begin;
    // Both are sorted by holder: a running holder without the right tiers in the set stops here.
    const auto holdings = sets_[run->set];
    walk.spend(holdings.size() + runners.size());
    auto holding = holdings.begin();
    std::size_t kept = 0;
    for (Runner runner : runners) {
      while (holding != holdings.end() && holding->holder() < runner.holder) ++holding;
      const bool there = holding != holdings.end() && holding->holder() == runner.holder;
      const unsigned running = runner.running & (there ? kColumnsOf[holding->tiers()] : 0U);
      for (unsigned ended = runner.running & ~running; ended != 0; ended &= ended - 1) {
        results[runner.result].blocks[static_cast<std::size_t>(std::countr_zero(ended))] =
            static_cast<std::uint32_t>(reached);
      }
      runner.running = static_cast<Columns>(running);
      if (running != 0) runners[kept++] = runner;
    }
    runners.resize(kept);
  }
  for (const Runner& runner : runners) {
    for (unsigned running = runner.running; running != 0; running &= running - 1) {
      results[runner.result].blocks[static_cast<std::size_t>(std::countr_zero(running))] =
          static_cast<std::uint32_t>(walk.count());
    }
  }

  // A rank can use the blocks that all of its groups hold.
  const auto by_rank = [](const Result& a, const Result& b) { return a.rank < b.rank; };
  if (!std::ranges::is_sorted(results, by_rank)) std::ranges::sort(results, by_rank);
  for (std::size_t begin = 0, end = 0; begin < results.size(); begin = end) {
    const Rank& rank = ranks_[results[begin].rank];
    Counts blocks = results[begin].blocks;
    for (end = begin + 1; end < results.size() && results[end].rank == results[begin].rank; ++end) {
      for (std::size_t column = 0; column < kColumnCount; ++column) {
        blocks[column] = std::min(blocks[column], results[end].blocks[column]);
      }
    }
    const std::size_t any = static_cast<std::size_t>(Column::kAny);
    if (end - begin < rank.holders.size() || blocks[any] == 0) continue;
    matches.workers.push_back(workers_[rank.worker].name);
    matches.dp_ranks.push_back(rank.dp_rank);
    for (std::size_t column = 0; column < kColumnCount; ++column) {
      matches.columns[column].push_back(blocks[column]);
    }
  }
}

void Table::match_hybrid(Walk& walk, const std::vector<bool>* wanted, Matches& matches) const {
  const std::uint64_t count = walk.count();
  std::array<Spans, kColumnCount> usable, held;
  for (const Rank& rank : ranks_) {
    if (rank.uniform || (wanted != nullptr && !(*wanted)[rank.worker])) continue;
    usable.fill({{1, count}});
    std::uint64_t bound = count, unit = 1;
    // Groups with the whole prefix come first: others are not read behind their end.
    for (const bool window : {false, true}) {
      for (const HolderId id : rank.holders) {
        const GroupHolder& holder = holders_[id];
        if ((holder.last != 0) != window || bound == 0) continue;
        unit = std::lcm(unit, std::uint64_t{holder.stride});
        if (unit > count) unit = count + 1;  // no length is a multiple
        find_held(id, walk, bound, held);
        bound = 0;
        for (std::size_t column = 0; column < kColumnCount; ++column) {
          keep_common(usable[column], held[column]);
          if (!usable[column].empty()) bound = std::max(bound, usable[column].back().last);
        }
      }
    }
    if (bound == 0 || longest(usable[static_cast<std::size_t>(Column::kAny)], unit) == 0) continue;
    matches.workers.push_back(workers_[rank.worker].name);
    matches.dp_ranks.push_back(rank.dp_rank);
    for (std::size_t column = 0; column < kColumnCount; ++column) {
      matches.columns[column].push_back(static_cast<std::uint32_t>(longest(usable[column], unit)));
    }
  }
}

// Calls visit(block, tiers) for the holder's tiers in each run of its blocks, from number `run` on, up to `bound`
// hashed blocks at least, and with no tiers at the end. False from visit() ends it.
template <typename Visit>
void Table::walk_holder(HolderId id, std::size_t run, std::uint64_t bound, Walk& walk, Visit visit) const {
  const std::uint64_t stride = holders_[id].stride;
  SetRuns& runs = walk.runs(holders_[id].stride);
  for (;; ++run) {
    const SetRuns::Run* const next = runs.at(run);
    const std::uint64_t begin = next == nullptr ? runs.count() : next->begin;
    const bool on = next != nullptr && begin * stride < bound;
    if (on) walk.spend(kLooksOfSearch);
    if (!visit(begin, on ? sets_.tiers(next->set, id) : Tiers{0}) || !on) return;
  }
}

// A holder's blocks of a prompt, by column, of its first `bound` hashed blocks at least.
void Table::find_held(HolderId id, Walk& walk, std::uint64_t bound,
                      std::array<Spans, kColumnCount>& held) const {
  const GroupHolder& holder = holders_[id];
  for (Spans& spans : held) spans.clear();
  std::array<std::uint64_t, kColumnCount> since{};
  Columns running = 0, from_root = kColumnsOf[kAllTiers];
  walk_holder(id, 0, bound, walk, [&](std::uint64_t begin, Tiers tiers) {
    const Columns now = kColumnsOf[tiers];
    // Most changes of the set concern other holders.
    for (std::size_t column = 0; column < kColumnCount && now != running; ++column) {
      const bool was = (running >> column & 1U) != 0, is = (now >> column & 1U) != 0;
      if (is && !was) since[column] = begin;
      if (was && !is) add_held(held[column], since[column], begin, holder.last, holder.stride);
    }
    running = now;
    from_root = static_cast<Columns>(from_root & now);
    // A holder that needs the whole prefix ends at its first hole.
    return holder.last != 0 || from_root != 0;
  });
}

// How far local blocks reach, and the pool's part from there on, as in kvpool's connector (kvpool/vllm/geometry.py,
// longest_hit): the engine goes on from its own hit, so the pool matters from there; a whole-prefix group needs
// every later block in the pool, a sliding window its last ones.
std::vector<std::uint32_t> Table::loadable(Walk& walk, const PoolOf& pool_of, const Matches& matches) const {
  struct Asked {
    std::uint32_t pool;   // a rank
    std::uint32_t local;  // blocks
    std::size_t row;
  };
  std::vector<Asked> asked;
  std::vector<std::uint32_t> loadable = matches.columns[static_cast<std::size_t>(Column::kLocal)];
  std::string_view last_name;
  constexpr std::uint32_t kNone = ~std::uint32_t{0};
  std::uint32_t pool = kNone;
  for (std::size_t row = 0; row < loadable.size(); ++row) {
    const std::uint32_t local = loadable[row];
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
    loadable[one.row] = static_cast<std::uint32_t>(reached);
    last = &one;
  }
  return loadable;
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
  const GroupHolder& holder = holders_[id];
  SetRuns& runs = walk.runs(holder.stride);
  // The local blocks may end within a group's block: then all of it is needed.
  const std::uint64_t from = local / holder.stride;
  Spans spans;
  if (from >= runs.count()) return spans;
  std::uint64_t since = 0;
  bool was = false;
  walk_holder(id, runs.index_of(from), bound, walk, [&](std::uint64_t begin, Tiers tiers) {
    const bool is = (tiers & tiers_of(Tier::kPool)) != 0;
    if (is && !was) since = begin;
    if (was && !is) {
      const std::uint64_t first = since <= from ? from + 1 : since + holder.last;
      if (first <= begin) spans.push_back({first * holder.stride, begin * holder.stride});
    }
    was = is;
    return is || holder.last != 0;
  });
  return spans;
}

}  // namespace kvpool
