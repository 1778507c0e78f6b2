// Leading blocks of a prompt by rank. See table.h.
#include <algorithm>
#include <bit>
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
                     const PoolOf& pool_of, Patience patience) const {
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
  if (pool_of) add_loadable(walk, pool_of, matches);
  return matches;
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
        find_held(holder, id, walk, bound, held);
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

// A holder's blocks of a prompt, by column, of its first `bound` hashed blocks at least.
void Table::find_held(const GroupHolder& holder, HolderId id, Walk& walk, std::uint64_t bound,
                      std::array<Spans, kColumnCount>& held) const {
  for (Spans& spans : held) spans.clear();
  std::array<std::uint64_t, kColumnCount> since{};
  Columns running = 0, from_root = kColumnsOf[kAllTiers];
  SetRuns& runs = walk.runs(holder.stride);
  // A holder that needs the whole prefix ends at its first hole.
  for (std::size_t i = 0; holder.last != 0 || from_root != 0; ++i) {
    const SetRuns::Run* const run = runs.at(i);
    const std::uint64_t begin = run == nullptr ? runs.count() : run->begin;
    const bool on = run != nullptr && begin * holder.stride < bound;
    if (on) walk.spend(kLooksOfSearch);
    const Columns now = on ? kColumnsOf[sets_.tiers(run->set, id)] : Columns{0};
    // Most changes of the set concern other holders.
    for (std::size_t column = 0; column < kColumnCount && now != running; ++column) {
      const bool was = (running >> column & 1U) != 0, is = (now >> column & 1U) != 0;
      if (is && !was) since[column] = begin;
      if (was && !is) add_held(held[column], since[column], begin, holder.last, holder.stride);
    }
    running = now;
    from_root = static_cast<Columns>(from_root & now);
    if (!on) return;
  }
}

}  // namespace kvpool
