// How far the leading blocks of a prompt reach with each rank. See table.h.
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

// Bit c: a block that is in these tiers counts for column c.
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

std::uint64_t load(std::span<const std::byte> hashes, std::size_t index) {
  std::uint64_t hash;
  std::memcpy(&hash, hashes.data() + index * sizeof hash, sizeof hash);
  return hash;
}

}  // namespace

Matches Table::match(std::span<const std::byte> hashes, const std::vector<std::string_view>* workers) const {
  const std::size_t count = hashes.size() / sizeof(std::uint64_t);
  Matches matches;
  if (count == 0) return matches;
  std::vector<Runner> runners;
  std::vector<Result> results;
  const auto held = read();

  std::vector<bool> wanted;
  if (workers != nullptr) {
    wanted.resize(workers_.size());
    for (const std::string_view name : *workers) {
      const auto known = worker_by_name_.find(name);
      if (known != worker_by_name_.end()) wanted[known->second] = true;
    }
  }

  std::array<FlatMap::Place, kAhead> places;
  for (std::size_t i = 0; i < std::min(count, kAhead); ++i) places[i] = blocks_.prefetch(load(hashes, i));
  const auto set_of = [&](std::size_t index) {
    FlatMap::Place& place = places[index % kAhead];
    const std::uint32_t* set = blocks_.touch(place, load(hashes, index));
    if (index + kAhead < count) place = blocks_.prefetch(load(hashes, index + kAhead));
    return set == nullptr ? kNobody : *set;
  };

  SetId last = set_of(0);
  for (const Holding holding : sets_[last]) {
    const GroupHolder& holder = holders_[holding.holder()];
    if (!holder.uniform || (workers != nullptr && !wanted[ranks_[holder.rank].worker])) continue;
    runners.push_back(
        {holding.holder(), kColumnsOf[holding.tiers()], static_cast<std::uint32_t>(results.size())});
    results.push_back({holder.rank, {}});
  }

  std::size_t reached = 1;
  for (; reached < count && !runners.empty(); ++reached) {
    const SetId set = set_of(reached);
    if (set == last) continue;
    last = set;
    // Both are sorted by holder: a holder that still runs and is not in the set, or not in the right tiers, stops here.
    const auto holdings = sets_[set];
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
          static_cast<std::uint32_t>(count);
    }
  }

  // A rank can use what all of its groups hold.
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
  if (hybrid_ranks_ != 0) match_hybrid(hashes, workers == nullptr ? nullptr : &wanted, matches);
  return matches;
}

void Table::match_hybrid(std::span<const std::byte> hashes, const std::vector<bool>* wanted,
                         Matches& matches) const {
  const std::uint64_t count = hashes.size() / sizeof(std::uint64_t);
  std::map<std::uint32_t, SetRuns> runs;  // by stride
  std::array<Spans, kColumnCount> usable, held;
  for (const Rank& rank : ranks_) {
    if (rank.uniform || (wanted != nullptr && !(*wanted)[rank.worker])) continue;
    usable.fill({{1, count}});
    std::uint64_t bound = count, unit = 1;
    // Those that need all of a prefix come first: no other is looked at behind the end of what they hold.
    for (const bool window : {false, true}) {
      for (const HolderId id : rank.holders) {
        const GroupHolder& holder = holders_[id];
        if ((holder.last != 0) != window || bound == 0) continue;
        unit = std::lcm(unit, std::uint64_t{holder.stride});
        if (unit > count) unit = count + 1;  // no length is a multiple
        const auto walk = runs.try_emplace(holder.stride, blocks_, hashes, holder.stride).first;
        find_held(holder, id, walk->second, bound, held);
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

// What a holder holds of a prompt, by column, of its first `bound` hashed blocks at least.
void Table::find_held(const GroupHolder& holder, HolderId id, SetRuns& runs, std::uint64_t bound,
                      std::array<Spans, kColumnCount>& held) const {
  for (Spans& spans : held) spans.clear();
  std::array<std::uint64_t, kColumnCount> since{};
  Columns running = 0, from_root = kColumnsOf[kAllTiers];
  std::uint64_t begin = 0;
  const SetRuns::Run* run = nullptr;
  for (std::size_t i = 0;; ++i) {
    // A holder that needs all of a prefix is not looked for behind its first hole.
    const bool on = begin * holder.stride < bound && (holder.last != 0 || from_root != 0);
    run = on ? runs.at(i) : nullptr;
    const Columns now = run == nullptr ? Columns{0} : kColumnsOf[sets_.tiers(run->set, id)];
    // Most changes of the set concern other holders.
    for (std::size_t column = 0; column < kColumnCount && now != running; ++column) {
      const bool was = (running >> column & 1U) != 0, is = (now >> column & 1U) != 0;
      if (is && !was) since[column] = begin;
      if (was && !is) add_held(held[column], since[column], begin, holder.last, holder.stride);
    }
    running = now;
    from_root = static_cast<Columns>(from_root & now);
    if (run == nullptr) return;
    begin = run->end;
  }
}

}  // namespace kvpool
