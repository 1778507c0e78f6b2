// What a table says after events, against plain models of what workers hold.
// Over 400 lines because the table is tested as one thing, beside one model of it.
#include "index/table.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "check.h"

namespace kvpool {
namespace {

using Hashes = std::vector<std::uint64_t>;

constexpr std::size_t kMany = std::size_t{1} << 20;

// One event in a batch of its own.
Applied tell(Table& table, std::string_view worker, Event::Kind kind, const Hashes& hashes,
             Tier tier = Tier::kDevice, std::uint32_t group = 0, Reach reach = Reach::kUnsaid,
             bool root = false, std::uint32_t dp_rank = 0) {
  EventBatch batch;
  batch.hashes = hashes;
  batch.events.push_back({kind, tier, reach, root, group, 0, hashes.size()});
  return table.apply(worker, dp_rank, batch);
}

Applied store(Table& table, std::string_view worker, const Hashes& hashes, Tier tier = Tier::kDevice) {
  return tell(table, worker, Event::Kind::kStored, hashes, tier);
}

Applied remove(Table& table, std::string_view worker, const Hashes& hashes, Tier tier = Tier::kDevice) {
  return tell(table, worker, Event::Kind::kRemoved, hashes, tier);
}

// (worker, rank) -> a column
std::map<std::pair<std::string, std::uint32_t>, std::uint32_t> ask(const Table& table, const Hashes& prompt,
                                                                   Column column = Column::kDevice) {
  const Matches matches = table.match(std::as_bytes(std::span(prompt)), nullptr);
  std::map<std::pair<std::string, std::uint32_t>, std::uint32_t> found;
  for (std::size_t row = 0; row < matches.workers.size(); ++row) {
    const auto blocks = matches.columns[static_cast<std::size_t>(column)][row];
    CHECK(found.emplace(std::pair(*matches.workers[row], matches.dp_ranks[row]), blocks).second);
  }
  return found;
}

std::uint32_t blocks_of(const Table& table, const std::string& worker, const Hashes& prompt,
                        Column column = Column::kDevice) {
  const auto found = ask(table, prompt, column);
  const auto row = found.find({worker, 0});
  return row == found.end() ? 0 : row->second;
}

Hashes range(std::uint64_t begin, std::uint64_t end) {
  Hashes hashes;
  for (std::uint64_t hash = begin; hash < end; ++hash) hashes.push_back(hash);
  return hashes;
}

}  // namespace

TEST(table_counts_leading_blocks_of_each_worker) {
  Table table(kMany, true);
  const Hashes prompt = range(0, 100);
  store(table, "a", prompt);
  store(table, "b", range(0, 7));
  store(table, "c", range(1, 100));  // all but the first
  CHECK((ask(table, prompt) ==
         std::map<std::pair<std::string, std::uint32_t>, std::uint32_t>{{{"a", 0}, 100}, {{"b", 0}, 7}}));
  CHECK(blocks_of(table, "c", range(1, 50)) == 49);
  CHECK(ask(table, {}).empty() && ask(table, {12345}).empty());
  const std::vector<std::string_view> only = {"b", "nobody"};
  CHECK(table.match(std::as_bytes(std::span(prompt)), &only).workers.size() == 1);
  CHECK(table.stats().blocks == 100);
}

TEST(table_fills_holes) {
  Table table(kMany, true);
  const Hashes prompt = range(0, 8);
  store(table, "a", prompt);
  remove(table, "a", {3});
  CHECK(blocks_of(table, "a", prompt) == 3);
  store(table, "a", {3});
  CHECK(blocks_of(table, "a", prompt) == 8);
}

TEST(table_counts_copies_on_the_device_only) {
  Table table(kMany, true);
  CHECK(store(table, "a", {1, 2}).stored == 2);
  CHECK(store(table, "a", {2}).copied == 1);
  CHECK(remove(table, "a", {2}).uncopied == 1);
  CHECK(blocks_of(table, "a", {1, 2}) == 2);
  CHECK(remove(table, "a", {2}).removed == 1);
  CHECK(blocks_of(table, "a", {1, 2}) == 1);
  CHECK(remove(table, "a", {2}).unknown == 1);
  for (const Tier tier : {Tier::kHost, Tier::kDisk, Tier::kPool}) {
    CHECK(store(table, "b", {1}, tier).stored == 1);
    CHECK(store(table, "b", {1}, tier).repeated == 1);
    CHECK(remove(table, "b", {1}, tier).removed == 1);
  }
  CHECK(table.stats().copies == 0 && table.stats().blocks == 1);
}

TEST(table_does_not_count_reports_of_reused_blocks) {
  const auto report = [](Table& table, const Hashes& hashes) {
    return tell(table, "a", Event::Kind::kStored, hashes, Tier::kDevice, 0, Reach::kWhole, true);
  };
  Table table(kMany, true);
  CHECK(report(table, {1, 2, 3}).stored == 3);
  for (int again = 0; again < 10; ++again) CHECK(report(table, {1, 2}).repeated == 2);
  CHECK(remove(table, "a", {1, 2}).removed == 2);
  // A report that knows more than the table: it fills what is missing, and still adds no copy.
  const Applied applied = report(table, {1, 2, 3});
  CHECK(applied.stored == 2 && applied.repeated == 1);
  CHECK(remove(table, "a", {3}).removed == 1);

  Table exact(kMany, false);
  report(exact, {1});
  CHECK(report(exact, {1}).copied == 1);
}

TEST(table_takes_tiers_apart_and_together) {
  Table table(kMany, true);
  const Hashes prompt = range(0, 10);
  store(table, "a", range(0, 4));
  store(table, "a", range(3, 7), Tier::kHost);
  store(table, "a", range(7, 8), Tier::kDisk);
  store(table, "a", range(0, 2), Tier::kPool);
  store(table, "a", range(8, 9), Tier::kPool);
  CHECK(blocks_of(table, "a", prompt, Column::kDevice) == 4);
  CHECK(blocks_of(table, "a", prompt, Column::kHost) == 0);
  CHECK(blocks_of(table, "a", prompt, Column::kPool) == 2);
  CHECK(blocks_of(table, "a", prompt, Column::kLocal) == 8);
  CHECK(blocks_of(table, "a", prompt, Column::kAny) == 9);
  CHECK(blocks_of(table, "a", prompt, Column::kMemory) == 7);
  tell(table, "a", Event::Kind::kCleared, {});
  CHECK(blocks_of(table, "a", prompt, Column::kLocal) == 0);
  CHECK(blocks_of(table, "a", prompt, Column::kAny) == 2);
  CHECK(table.clear("a", std::nullopt, tiers_of(Tier::kPool)));
  CHECK(ask(table, prompt).empty() && table.stats().blocks == 0);
}

TEST(table_credits_what_all_whole_groups_hold) {
  Table table(kMany, true);
  const Hashes prompt = range(0, 10);
  const auto stored = [&](std::uint32_t group, Reach reach, const Hashes& hashes) {
    tell(table, "a", Event::Kind::kStored, hashes, Tier::kDevice, group, reach);
  };
  stored(0, Reach::kWhole, prompt);
  CHECK(blocks_of(table, "a", prompt) == 10);
  stored(3, Reach::kUnsaid, range(0, 30));
  CHECK(blocks_of(table, "a", prompt) == 10 && table.stats().blocks == 30);
  stored(3, Reach::kPart, {});  // what it was believed to hold may have been reports
  CHECK(blocks_of(table, "a", prompt) == 0 && table.stats().blocks == 10);
  stored(3, Reach::kWhole, range(0, 30));
  stored(2, Reach::kWhole, range(1, 6));
  CHECK(blocks_of(table, "a", prompt) == 0);
  stored(2, Reach::kWhole, {0});
  CHECK(blocks_of(table, "a", prompt) == 6);
  // A removal in a group that is not known yet says nothing of the others.
  CHECK(tell(table, "a", Event::Kind::kRemoved, {0}, Tier::kDevice, 7).unknown == 1);
  CHECK(blocks_of(table, "a", prompt) == 6);
}

// The last blocks of a window, against a plain walk over what it holds.
TEST(table_credits_what_windows_could_go_on_from) {
  std::mt19937 chance(5);
  const auto draw = [&](std::uint32_t below) { return static_cast<std::uint32_t>(chance() % below); };
  for (unsigned round = 0; round < 200; ++round) {
    const std::uint32_t last = 1 + draw(4), length = 1 + draw(40);
    Table table(kMany, false, 16);
    const Hashes prompt = range(0, length);
    const std::uint32_t whole = draw(length + 1);
    EventBatch batch;
    batch.hashes = range(0, whole);
    batch.events.push_back(
        {Event::Kind::kStored, Tier::kDevice, Reach::kWhole, true, 0, 0, whole, false, 16, 0});
    std::vector<bool> held(length);
    for (std::uint32_t block = 0; block < length; ++block) {
      if (!(held[block] = draw(5) != 0)) continue;
      batch.hashes.push_back(block);
      batch.events.push_back({Event::Kind::kStored, Tier::kDevice, Reach::kWindow, false, 1,
                              batch.hashes.size() - 1, 1, false, 16, 16 * last + 1});
    }
    table.apply("a", 0, batch);
    std::uint32_t best = 0;
    for (std::uint32_t count = 1; count <= whole; ++count) {
      bool good = true;
      for (std::uint32_t block = count - std::min(count, last); block < count; ++block)
        good = good && held[block];
      if (good) best = count;
    }
    CHECK(blocks_of(table, "a", prompt) == (std::ranges::find(held, true) == held.end() ? whole : best));
    table.remove_worker("a");
    CHECK(ask(table, prompt).empty() && table.stats().blocks == 0);
  }
}

TEST(table_forgets_workers_and_ranks) {
  Table table(kMany, true);
  const Hashes prompt = range(0, 5000);
  for (const char* worker : {"a", "b", "c"}) {
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      tell(table, worker, Event::Kind::kStored, prompt, Tier::kDevice, 0, Reach::kWhole, false, rank);
    }
    store(table, worker, prompt);
  }
  store(table, "b", range(5000, 9000));
  store(table, "b", range(0, 10), Tier::kPool);
  CHECK(table.stats().blocks == 9000 && table.stats().copies == 15'000);
  CHECK(table.held_by("b") == (TierBlocks{14'000, 0, 0, 10}) && table.held_by("z") == TierBlocks{});
  CHECK(table.stats().tier_blocks == (TierBlocks{34'000, 0, 0, 10}));
  CHECK(table.clear("a", 1, kAllTiers) && !table.clear("a", 9, kAllTiers) && !table.clear("z", 0, kAllTiers));
  CHECK(ask(table, prompt).size() == 5);
  CHECK(table.remove_worker("b") && !table.remove_worker("b"));
  CHECK(ask(table, prompt).size() == 3);
  CHECK(table.stats().blocks == 5000 && table.stats().unswept == 4000);
  // The places of forgotten blocks come back with the batches that follow, and the numbers of b go to others.
  for (int i = 0; i < 20; ++i) tell(table, "d", Event::Kind::kStored, {});
  CHECK(table.stats().unswept == 0);
  store(table, "d", {0});
  CHECK(blocks_of(table, "d", prompt) == 1);
  CHECK(table.remove_worker("a") && table.remove_worker("c") && table.remove_worker("d"));
  for (int i = 0; i < 20; ++i) tell(table, "e", Event::Kind::kStored, {});
  const TableStats stats = table.stats();
  CHECK(stats.blocks == 0 && stats.unswept == 0 && stats.holder_sets == 0 && stats.copies == 0);
  CHECK(stats.tier_blocks == TierBlocks{});
}

TEST(table_makes_room) {
  Table table(10, true);
  CHECK(store(table, "a", range(0, 15)).evicted == 5);
  CHECK(table.stats().blocks == 10 && table.evicted("a") == 5);
  // Blocks that nobody holds go first.
  table.remove_worker("a");
  const Applied applied = store(table, "b", range(100, 110));
  CHECK(applied.stored == 10 && applied.evicted == 0);
  CHECK(table.stats().unswept == 0);
}

TEST(table_keeps_its_budget) {
  const auto budget = std::make_shared<MemoryBudget>(std::size_t{4} << 20);
  {
    Table first(kMany, false, 0, budget);
    Table second(kMany, false, 0, budget);
    std::mt19937_64 chance(10);
    for (int batch = 0; batch < 60; ++batch) {
      Hashes hashes(3000);
      for (std::uint64_t& hash : hashes) hash = chance();
      CHECK(store(first, "a", hashes).refused == 0);
      store(first, "a", hashes);  // a second copy of each
      hashes.resize(300);
      store(second, "b", hashes);
    }
    CHECK(budget->used_nbytes == first.stats().nbytes + second.stats().nbytes);
    CHECK(budget->used_nbytes < (std::size_t{6} << 20));
    CHECK(first.stats().applied.evicted > 0);
    CHECK(first.stats().blocks > 40'000);
  }
  CHECK(budget->used_nbytes == 0);
}

// What is forgotten comes back, goes, is copied and reported: a block is never held when the engine has none.
TEST(table_never_holds_more_than_the_engine) {
  std::mt19937_64 chance(11);
  Table table(500, false);
  std::map<std::uint64_t, std::uint32_t> engine;
  for (int step = 0; step < 60'000; ++step) {
    const std::uint64_t begin = chance() % 2000;
    const Hashes hashes = range(begin, begin + 1 + chance() % 8);
    if (chance() % 2 == 0) {
      store(table, "a", hashes);
      for (const std::uint64_t hash : hashes) ++engine[hash];
    } else {
      Hashes there;
      for (const std::uint64_t hash : hashes) {
        if (engine[hash] != 0) there.push_back(hash), --engine[hash];
      }
      remove(table, "a", there);
    }
    CHECK(table.stats().blocks <= 500);
    const std::uint64_t asked = chance() % 2000;
    if (engine[asked] == 0) CHECK(blocks_of(table, "a", {asked}, Column::kDevice) == 0);
  }
  CHECK(table.stats().applied.evicted > 1000);
}

TEST(table_refuses_what_is_too_much) {
  CHECK_THROWS(std::invalid_argument, Table(0, true));
  Table wide(kMany, true);
  CHECK_THROWS(std::invalid_argument, store(wide, "", {1}));
  CHECK_THROWS(std::invalid_argument, store(wide, std::string(257, 'x'), {1}));
  EventBatch batch;
  batch.hashes = {1};
  for (std::uint32_t group = 0; group < 300; ++group) {
    batch.events.push_back({Event::Kind::kStored, Tier::kDevice, Reach::kWhole, false, group, 0, 1});
  }
  CHECK(wide.apply("a", 0, batch).refused == 44);
}

// Against sets and counters, with everything at once: what is a copy, what is a hole, who is gone.
TEST(table_does_what_a_plain_model_does) {
  std::mt19937_64 chance(9);
  for (int round = 0; round < 6; ++round) {
    Table table(kMany, false);
    // (worker, tier) -> block -> copies
    std::map<std::pair<std::string, Tier>, std::map<std::uint64_t, std::uint32_t>> model;
    const std::uint64_t blocks = round % 2 == 0 ? 40 : 4000;
    for (int step = 0; step < 3000; ++step) {
      const std::string worker(1, static_cast<char>('a' + chance() % 12));
      const auto tier = static_cast<Tier>(chance() % kTierCount);
      const std::uint64_t begin = chance() % blocks;
      const Hashes hashes = range(begin, std::min(blocks, begin + chance() % 30));
      const auto what = chance() % 100;
      if (what < 55) {
        store(table, worker, hashes, tier);
        for (const std::uint64_t hash : hashes) {
          std::uint32_t& copies = model[{worker, tier}][hash];
          copies = tier == Tier::kDevice ? copies + 1 : 1;
        }
      } else if (what < 97) {
        remove(table, worker, hashes, tier);
        auto& held = model[{worker, tier}];
        for (const std::uint64_t hash : hashes) {
          if (const auto found = held.find(hash); found != held.end() && --found->second == 0)
            held.erase(found);
        }
      } else if (what < 98) {
        table.remove_worker(worker);
        for (unsigned other = 0; other < kTierCount; ++other) model.erase({worker, static_cast<Tier>(other)});
      } else if (what < 99) {
        table.clear(worker, std::nullopt, tiers_of(tier));
        model.erase({worker, tier});
      } else {
        tell(table, worker, Event::Kind::kCleared, {});
        for (const Tier local : {Tier::kDevice, Tier::kHost, Tier::kDisk}) model.erase({worker, local});
      }
      if (step % 50 != 0) continue;
      const std::uint64_t first = chance() % blocks;
      const Hashes prompt = range(first, blocks);
      std::map<std::uint64_t, int> held;
      for (const auto& [holder, its] : model) {
        for (const auto& [hash, copies] : its) ++held[hash];
        std::uint32_t run = 0;
        while (run < prompt.size() && its.contains(prompt[run])) ++run;
        CHECK(blocks_of(table, holder.first, prompt, static_cast<Column>(holder.second)) == run);
      }
      CHECK(table.stats().blocks == held.size());
    }
  }
}

// Everything marked, some of it stored again meanwhile, the rest swept; while others come and go.
TEST(table_settles_what_is_in_the_pool) {
  Table table(kMany, true);
  const Hashes all = range(0, 30000);
  store(table, "pool", all, Tier::kPool);
  store(table, "pool", all, Tier::kHost);
  store(table, "other", all, Tier::kPool);
  std::size_t steps = 0;
  std::uint64_t cursor = 0;
  do {
    cursor = table.mark("pool", cursor);
    store(table, "pool", range(40000 + 100 * steps, 40100 + 100 * steps), Tier::kPool);  // the map grows
    ++steps;
  } while (cursor != 0);
  CHECK(steps > 10);
  store(table, "pool", range(0, 10000), Tier::kPool);
  remove(table, "pool", range(9000, 11000), Tier::kPool);
  store(table, "pool", range(20000, 20500), Tier::kHost);  // says nothing of the pool
  store(table, "pool", range(40000, 40000 + 100 * steps), Tier::kPool);
  std::size_t went = 0, left = 1;
  while (left != 0) {
    const auto [more, marks] = table.sweep("pool");
    went += more;
    left = marks;
  }
  CHECK(went == 19000);
  CHECK(blocks_of(table, "pool", all, Column::kPool) == 9000);
  CHECK(blocks_of(table, "pool", all, Column::kHost) == 30000);
  CHECK(blocks_of(table, "other", all, Column::kPool) == 30000);
  CHECK(blocks_of(table, "pool", range(40000, 40000 + 100 * steps), Column::kPool) == 100 * steps);
  CHECK((table.sweep("pool") == std::pair<std::size_t, std::size_t>{0, 0}));
  CHECK(table.mark("nobody", 0) == 0);

  // A round that never ends, of a worker that goes.
  CHECK(table.mark("other", 0) != 0);
  CHECK(table.clear("other", std::nullopt, tiers_of(Tier::kPool)));
  store(table, "other", range(0, 10), Tier::kPool);
  for (cursor = 1; cursor != 0;) cursor = table.mark("other", cursor);
  CHECK(table.sweep("other").first == 0);
  CHECK(blocks_of(table, "other", all, Column::kPool) == 10);
  CHECK(table.mark("other", 0) != 0);
  CHECK(table.remove_worker("other"));
  CHECK((table.sweep("other") == std::pair<std::size_t, std::size_t>{0, 0}));
}

// Ranks and a pool with holes, of which the second group may need only its last blocks.
TEST(table_says_what_a_worker_has_in_the_pool) {
  Table table(kMany, true);
  store(table, "a", {1, 2, 3}, Tier::kPool);
  store(table, "a", {4});
  store(table, "b", {5}, Tier::kPool);
  const Hashes asked = {1, 4, 5, 3, 9};
  const auto bytes = std::as_bytes(std::span(asked));
  CHECK(table.pooled("a", bytes) == (std::vector<bool>{true, false, false, true, false}));
  CHECK(table.pooled("z", bytes) == std::vector<bool>(5));
  CHECK(table.pooled("a", bytes.first(7)).empty());
  remove(table, "a", {3}, Tier::kPool);
  CHECK(!table.pooled("a", bytes)[3]);
  CHECK(table.pooled("b", bytes, Patience::kAtOnce)[2]);
}

TEST(table_goes_on_in_the_pool_where_a_worker_ends) {
  std::mt19937 chance(12);
  const auto draw = [&](std::uint32_t below) { return static_cast<std::uint32_t>(chance() % below); };
  for (unsigned round = 0; round < 300; ++round) {
    const std::uint32_t length = 1 + draw(30), last = draw(3);
    const Hashes prompt = range(0, length);
    Table table(kMany, false, 16);
    std::map<std::string, std::uint32_t> local;
    for (const char* worker : {"a", "b", "c"})
      store(table, worker, range(0, local[worker] = draw(length + 1)));
    std::vector<bool> whole(length), window(length);
    EventBatch batch;
    for (std::uint32_t block = 0; block < length; ++block) {
      for (const std::uint32_t group : {0U, 1U}) {
        std::vector<bool>& held = group == 0 ? whole : window;
        if (!(held[block] = draw(8) != 0)) continue;
        batch.hashes.push_back(block);
        Event event{
            Event::Kind::kStored, Tier::kPool, Reach::kWhole, false, group, batch.hashes.size() - 1, 1};
        event.block_tokens = 16;
        if (group == 1 && last != 0) {
          event.reach = Reach::kWindow;
          event.window_tokens = 16 * last + 1;
        }
        batch.events.push_back(event);
      }
    }
    table.apply("a", 0, batch, "pool");
    const bool has_window = std::ranges::find(window, true) != window.end();
    const bool has_whole = std::ranges::find(whole, true) != whole.end();
    const PoolOf pool_of = [](std::string_view worker) {
      return worker == "pool" || worker == "c" ? std::string_view() : std::string_view("pool");
    };
    const Matches matches = table.match(std::as_bytes(std::span(prompt)), nullptr, pool_of);
    for (std::size_t row = 0; row < matches.workers.size(); ++row) {
      const std::string& worker = *matches.workers[row];
      const std::uint32_t own = local[worker];
      if (worker == "pool" || own == 0) continue;
      std::uint32_t best = own;
      for (std::uint32_t count = own + 1; count <= length && worker != "c"; ++count) {
        bool good = has_whole || has_window;
        for (std::uint32_t block = own; block < count; ++block) good = good && (whole[block] || !has_whole);
        std::uint32_t begin = own;
        if (last != 0) begin = std::max(own, count - std::min(count, last));
        for (std::uint32_t block = begin; block < count; ++block)
          good = good && (window[block] || !has_window);
        if (good) best = count;
      }
      CHECK(matches.columns[static_cast<std::size_t>(Column::kLocal)][row] == own);
      CHECK(matches.loadable[row] == best);
    }
    CHECK(table.match(std::as_bytes(std::span(prompt)), nullptr).loadable.empty());
  }
}

TEST(table_refuses_a_prompt_that_goes_in_circles) {
  Table table(kMany, true);
  store(table, "a", range(0, 100));
  store(table, "b", {0});
  for (const std::size_t circle : {1U, 2U, 3U, 50U, 99U}) {
    Hashes prompt;
    for (std::size_t i = 0; i < 1000; ++i) prompt.push_back(i % circle);
    CHECK_THROWS(std::invalid_argument, ask(table, prompt));
  }
  Hashes honest = range(0, 1000);
  CHECK(ask(table, honest).size() == 2);
}

// Sets that take turns, and more of them than are remembered.
TEST(table_counts_on_through_sets_that_take_turns) {
  Table table(kMany, false);
  const Hashes prompt = range(0, 2000);
  for (const char* worker : {"a", "b", "c"}) store(table, worker, prompt);
  remove(table, "b", {1500});
  for (std::uint64_t turn = 0; turn < 150; ++turn) {
    Hashes some;
    for (std::uint64_t hash = turn; hash < prompt.size(); hash += 150) some.push_back(hash);
    store(table, "turn" + std::to_string(turn), some);
  }
  const auto found = ask(table, prompt);
  CHECK(found.size() == 4 && found.at({"a", 0}) == 2000 && found.at({"b", 0}) == 1500);
  CHECK(found.at({"c", 0}) == 2000 && found.at({"turn0", 0}) == 1);
}

TEST(table_stops_a_match_that_takes_too_long) {
  Table table(kMany, false, 16);
  const Hashes prompt = range(0, 4096);
  Hashes even;
  for (std::uint64_t hash = 0; hash < prompt.size(); hash += 2) even.push_back(hash);
  EventBatch batch;
  batch.hashes = prompt;
  for (const std::uint32_t group : {0U, 1U}) {
    Event event{Event::Kind::kStored, Tier::kDevice, Reach::kWhole, false, group, 0, prompt.size()};
    event.block_tokens = 16;
    if (group == 1) {
      event.reach = Reach::kWindow;
      event.window_tokens = 33;
    }
    batch.events.push_back(event);
  }
  for (int worker = 0; worker < 600; ++worker) table.apply("w" + std::to_string(worker), 0, batch);
  CHECK(ask(table, prompt).size() == 600);
  store(table, "half", even);
  CHECK_THROWS(TooMuchWork, ask(table, prompt));
  const std::vector<std::string_view> some = {"w3", "w5"};
  const auto match_at_once = [&](std::size_t blocks, const std::vector<std::string_view>* workers) {
    return table.match(std::as_bytes(std::span(prompt).first(blocks)), workers, nullptr, Patience::kAtOnce);
  };
  CHECK(table.match(std::as_bytes(std::span(prompt)), &some).workers.size() == 2);
  CHECK(match_at_once(4096, &some).workers.size() == 2);
  CHECK(match_at_once(16, nullptr).workers.size() == 601);
  const Hashes start = range(0, 400);
  CHECK(ask(table, start).size() == 601);
  CHECK_THROWS(NotAtOnce, match_at_once(start.size(), nullptr));
}

// `turns` times: a block is stored, and what is stored is taken away, by a clear or by a group that changes its kind.
EventBatch in_turns(int turns, bool clears) {
  EventBatch batch;
  for (int turn = 0; turn < turns; ++turn) {
    Event event{Event::Kind::kStored, Tier::kDevice, Reach::kWhole, false, 0, batch.hashes.size(), 1};
    if (!clears && turn % 2 != 0) event.reach = Reach::kState;
    batch.hashes.push_back(1000 + static_cast<std::uint64_t>(turn));
    batch.events.push_back(event);
    if (clears) batch.events.push_back({Event::Kind::kCleared});
  }
  return batch;
}

TEST(table_refuses_a_batch_that_stores_and_clears_in_turns) {
  for (const bool clears : {true, false}) {
    Table table(kMany, false);
    const Hashes prompt = range(0, 100);
    store(table, "other", prompt);
    store(table, "w", prompt);
    store(table, "w", {200}, Tier::kHost);
    CHECK(table.apply("w", 0, in_turns(16, clears)).stored == 16);
    CHECK(table.held_by("w")[0] == (clears ? 0 : 1));
    store(table, "w", prompt);
    CHECK_THROWS(ClearedTooOften, table.apply("w", 0, in_turns(1000, clears)));
    CHECK(table.held_by("w") == TierBlocks{} && table.content("w")->digest == 0);
    CHECK(ask(table, prompt).size() == 1 && table.held_by("other")[0] == 100);
    CHECK(table.stats().blocks == 100);
  }
  Table table(kMany, false);
  store(table, "w", {1});
  EventBatch idle;
  idle.events.assign(1000, {Event::Kind::kCleared});
  CHECK(table.apply("w", 0, idle).cleared_events == 1000);
  CHECK(table.held_by("w") == TierBlocks{});
}

// One writer stores prompts block by block from the root and takes them away from the end: whoever asks meanwhile
// must see a prefix that was whole at some moment, and never a worker's name beside another's blocks.
TEST(table_is_read_while_it_is_written) {
  Table table(kMany, false);
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> asked{0};
  const Hashes even = range(0, 64);
  const Hashes odd = range(1000, 1064);
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i) {
    readers.emplace_back([&] {
      while (!stop) {
        for (const auto& [row, blocks] : ask(table, even)) {
          CHECK(row.first == "even" && blocks % 2 == 0 && blocks <= 64);
        }
        for (const auto& [row, blocks] : ask(table, odd)) {
          CHECK(row.first == "odd" && blocks % 2 == 1 && blocks <= 63);
        }
        (void)table.stats();
        ++asked;
      }
    });
  }
  for (std::uint64_t turn = 0; asked < 2000 || turn < 200; ++turn) {
    for (std::uint64_t block = 0; block < 64; block += 2) store(table, "even", {block, block + 1});
    store(table, "odd", {1000});
    for (std::uint64_t block = 1; block < 63; block += 2) store(table, "odd", {1000 + block, 1001 + block});
    if (turn % 3 == 0) {
      table.remove_worker("even");
      table.remove_worker("odd");
      continue;
    }
    for (std::uint64_t block = 64; block != 0; block -= 2) remove(table, "even", {block - 1, block - 2});
    for (std::uint64_t block = 63; block != 1; block -= 2) {
      remove(table, "odd", {1000 + block - 1, 1000 + block - 2});
    }
    remove(table, "odd", {1000});
  }
  stop = true;
  for (std::thread& reader : readers) reader.join();
}

}  // namespace kvpool
