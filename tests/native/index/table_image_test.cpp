// Images of tables: there and back, damaged, and while others write.
#include "index/table_image.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "check.h"
#include "index/table.h"
#include "key/checksum.h"

namespace kvpool {
namespace {

using Hashes = std::vector<std::uint64_t>;
using Packed = std::vector<std::byte>;

constexpr std::size_t kMany = std::size_t{1} << 20;

Table restored(const Packed& packed, std::size_t max_blocks = kMany) {
  return {max_blocks, true, 0, nullptr, unpack_image(packed)};
}

Packed packed(const TableImage& image) {
  const std::string bytes = pack_image(image);
  const auto span = std::as_bytes(std::span(bytes));
  return {span.begin(), span.end()};
}
Packed packed(const Table& table) { return packed(table.image()); }

// (worker, rank) -> all columns
using Answer = std::map<std::pair<std::string, std::uint32_t>, std::vector<std::uint32_t>>;

Answer ask(const Table& table, const Hashes& prompt) {
  const Matches matches = table.match(std::as_bytes(std::span(prompt)), nullptr);
  Answer found;
  for (std::size_t row = 0; row < matches.workers.size(); ++row) {
    auto& counts = found[{*matches.workers[row], matches.dp_ranks[row]}];
    for (const auto& column : matches.columns) counts.push_back(column[row]);
  }
  return found;
}

// Batches of few hashes, so that blocks meet again: stored, copied, removed, cleared, by ranks, groups and tiers.
struct Talk {
  std::mt19937_64 chance;

  std::string worker() { return "w" + std::to_string(chance() % 4); }
  EventBatch batch() {
    EventBatch batch;
    const std::size_t events = 1 + chance() % 4;
    for (std::size_t i = 0; i < events; ++i) {
      Event event{};
      const auto kind = chance() % 20;
      event.kind = kind < 13   ? Event::Kind::kStored
                   : kind < 19 ? Event::Kind::kRemoved
                               : Event::Kind::kCleared;
      event.tier = static_cast<Tier>(chance() % kTierCount);
      event.group = static_cast<std::uint32_t>(chance() % 3);
      event.reach = event.group == 2 ? Reach::kPart : Reach::kWhole;
      event.root = chance() % 3 == 0;
      event.begin = batch.hashes.size();
      event.count = event.kind == Event::Kind::kCleared ? 0 : 1 + chance() % 12;
      const std::uint64_t first = chance() % 60;
      for (std::size_t k = 0; k < event.count; ++k) batch.hashes.push_back(first + k);
      batch.events.push_back(event);
    }
    if (chance() % 2 == 0) batch.dp_rank = static_cast<std::uint32_t>(chance() % 2);
    return batch;
  }
};

void check_same(const Table& a, const Table& b, std::mt19937_64& chance) {
  CHECK(a.stats().blocks == b.stats().blocks);
  CHECK(a.stats().copies == b.stats().copies);
  for (const std::string& worker : b.workers()) {
    CHECK(a.content(worker)->digest == b.content(worker)->digest);
    CHECK(a.content(worker)->blocks == b.content(worker)->blocks);
  }
  for (int i = 0; i < 20; ++i) {
    Hashes prompt;
    for (std::uint64_t hash = chance() % 60; prompt.size() < 12; ++hash) prompt.push_back(hash);
    CHECK((ask(a, prompt) == ask(b, prompt)));
  }
}

// With the checksum that the body has now, so that what comes behind it is reached.
Packed resealed(Packed bytes) {
  const std::uint64_t body = bytes.size() - 32;
  std::memcpy(bytes.data() + 16, &body, sizeof body);
  std::memset(bytes.data() + 24, 0, 8);
  Checksum checksum;
  checksum.update(bytes);
  const std::uint64_t digest = checksum.digest();
  std::memcpy(bytes.data() + 24, &digest, sizeof digest);
  return bytes;
}

bool is_refused(const Packed& bytes) {
  try {
    const Table table = restored(bytes);
    CHECK(table.stats().blocks <= bytes.size() / 8);
    return false;
  } catch (const DamagedImage&) {
    return true;
  }
}

void store(Table& table, std::string_view worker, const Hashes& hashes, bool root = false) {
  EventBatch batch;
  batch.hashes = hashes;
  batch.events.push_back({Event::Kind::kStored, Tier::kDevice, Reach::kWhole, root, 0, 0, hashes.size()});
  table.apply(worker, 0, batch);
}

}  // namespace

TEST(image_of_a_table_makes_the_same_table_and_it_goes_on_the_same) {
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    Talk talk{std::mt19937_64(seed)};
    Table table(kMany, true);
    for (int i = 0; i < 60; ++i) table.apply(talk.worker(), 0, talk.batch(), "pool");
    if (seed % 2 == 0) table.remove_worker("w1");
    Table copy = restored(packed(table));
    check_same(table, copy, talk.chance);
    for (int i = 0; i < 60; ++i) {
      const std::string worker = talk.worker();
      const EventBatch batch = talk.batch();
      table.apply(worker, 0, batch, "pool");
      copy.apply(worker, 0, batch, "pool");
    }
    check_same(table, copy, talk.chance);
  }
}

TEST(image_of_an_empty_table_is_empty) {
  const Table table(kMany, true);
  const Table copy = restored(packed(table));
  CHECK(copy.stats().blocks == 0 && copy.workers().empty());
}

TEST(image_of_a_large_table_costs_little_more_than_its_hashes) {
  Table table(kMany, true);
  std::mt19937_64 chance(3);
  for (int prompt = 0; prompt < 16; ++prompt) {
    Hashes hashes(8192);
    for (std::uint64_t& hash : hashes) hash = chance();
    for (int holder = 0; holder < 8; ++holder) {
      const std::size_t part = holder == 0 ? hashes.size() : 1 + chance() % hashes.size();
      store(table, "w" + std::to_string(chance() % 64),
            Hashes(hashes.begin(), hashes.begin() + std::ptrdiff_t(part)));
    }
  }
  const Packed bytes = packed(table);
  CHECK(bytes.size() < table.stats().blocks * 9 + (table.stats().copies * 13));
  const Table copy = restored(bytes);
  CHECK(copy.stats().blocks == table.stats().blocks && copy.stats().copies == table.stats().copies);
}

TEST(image_with_any_byte_changed_or_missing_is_refused) {
  Talk talk{std::mt19937_64(7)};
  Table table(kMany, true);
  for (int i = 0; i < 60; ++i) table.apply(talk.worker(), 0, talk.batch());
  const Packed bytes = packed(table);
  CHECK(!is_refused(bytes));
  for (std::size_t at = 0; at < bytes.size(); ++at) {
    for (const unsigned flip : {1U, 0x80U, 0xFFU}) {
      Packed changed = bytes;
      changed[at] ^= static_cast<std::byte>(flip);
      CHECK(is_refused(changed));
    }
    CHECK(is_refused(Packed(bytes.begin(), bytes.begin() + std::ptrdiff_t(at))));
  }
  Packed longer = bytes;
  longer.push_back(std::byte{0});
  CHECK(is_refused(longer));
  CHECK(is_refused(resealed(longer)));
}

// Whoever can make a checksum can say anything; it must end in a table that makes sense, or be refused.
TEST(image_that_lies_is_refused_or_harmless) {
  Talk talk{std::mt19937_64(9)};
  Table table(kMany, true);
  for (int i = 0; i < 60; ++i) table.apply(talk.worker(), 0, talk.batch());
  const Packed bytes = packed(table);
  std::size_t refused = 0;
  for (std::size_t at = 32; at < bytes.size(); ++at) {
    for (int i = 0; i < 4; ++i) {
      Packed changed = bytes;
      changed[at] = static_cast<std::byte>(i == 0 ? 0xFF : talk.chance());
      refused += is_refused(resealed(changed));
    }
    refused += is_refused(resealed(Packed(bytes.begin(), bytes.begin() + std::ptrdiff_t(at))));
  }
  CHECK(refused > bytes.size());
}

TEST(image_names_what_makes_no_sense) {
  const auto refused = [](auto change) {
    TableImage image;
    image.holders = {{"w", 0, 0, true, 0, 1, 0}, {"w", 0, 1, false, 0, 1, 0}};
    image.holdings = {Holding(0, 1)};
    image.set_ends = {1};
    image.hashes = {5, 6};
    image.set_of = {0, 0};
    image.copies = {{0, 2, 5}};
    change(image);
    return is_refused(packed(image));
  };
  CHECK(!refused([](TableImage&) {}));
  CHECK(refused([](TableImage& image) { image.holders[1] = image.holders[0]; }));
  CHECK(refused([](TableImage& image) { image.holders[0].worker = ""; }));
  CHECK(refused([](TableImage& image) { image.holders[0].worker = std::string(257, 'w'); }));
  CHECK(refused([](TableImage& image) { image.holders[0].dp_rank = 65536; }));
  CHECK(refused(
      [](TableImage& image) { image.holdings[0] = Holding(1, 1); }));  // of a group that has no blocks
  CHECK(refused([](TableImage& image) { image.holdings[0] = Holding(2, 1); }));
  CHECK(refused([](TableImage& image) { image.holdings[0] = Holding(0, 0); }));
  CHECK(refused([](TableImage& image) { image.hashes[1] = 5; }));
  CHECK(refused([](TableImage& image) { image.copies[0].more = 0; }));
  CHECK(refused([](TableImage& image) { image.copies[0].holder = 1; }));
  CHECK(refused([](TableImage& image) { image.copies.push_back({0, 1, 5}); }));
  CHECK(refused(
      [](TableImage& image) { image.holdings[0] = Holding(0, 2); }));  // copies of what is not on the device
  CHECK(refused([](TableImage& image) { image.holdings = {}, image.set_ends = {0}; }));
}

TEST(image_with_more_blocks_than_there_is_room_for_is_taken_in_part) {
  Table table(kMany, true);
  Hashes hashes(1000);
  for (std::size_t i = 0; i < hashes.size(); ++i) hashes[i] = i;
  store(table, "w", hashes);
  store(table, "w", hashes);
  Table copy = restored(packed(table), 100);
  CHECK(copy.stats().blocks == 100 && copy.stats().applied.refused == 900 && copy.stats().copies == 100);
  CHECK(copy.evicted("w") == 900 && copy.stats().holder_sets == 1);
  const Table again = restored(packed(copy));
  CHECK(again.evicted("w") == 900 && again.content("w")->digest == copy.content("w")->digest);
}

TEST(image_keeps_the_budget) {
  const auto budget = std::make_shared<MemoryBudget>(std::size_t{2} << 20);
  Table table(kMany, true);
  Hashes hashes(200'000);
  for (std::size_t i = 0; i < hashes.size(); ++i) hashes[i] = i;
  store(table, "w", hashes);
  store(table, "w", hashes);
  {
    const Table copy(kMany, true, 0, budget, unpack_image(packed(table)));
    CHECK(budget->used_nbytes == copy.stats().nbytes);
    CHECK(budget->used_nbytes < (std::size_t{3} << 20));
    CHECK(copy.stats().blocks > 60'000 && copy.stats().applied.refused > 0);
    CHECK(copy.evicted("w") == copy.stats().applied.refused);
  }
  CHECK(budget->used_nbytes == 0);
}

TEST(image_is_of_one_moment) {
  Table table(kMany, true);
  std::atomic<bool> ended = false;
  std::thread writer([&] {
    for (std::uint64_t i = 0; i < 20'000; ++i) store(table, "w", {3 * i, 3 * i + 1, 3 * i + 2});
    ended = true;
  });
  std::size_t before = 0;
  while (!ended) {
    const TableImage image = table.image();
    CHECK(image.hashes.size() % 3 == 0 && image.hashes.size() >= before);
    before = image.hashes.size();
  }
  writer.join();
}

TEST(digest_is_of_what_is_held_and_not_of_how_it_came) {
  Table a(kMany, true), b(kMany, true);
  store(a, "w", {1, 2, 3});
  store(a, "w", {1});
  store(a, "other", {9});
  store(b, "w", {3, 4});
  store(b, "w", {1, 1});
  EventBatch removed;
  removed.hashes = {4};
  removed.events.push_back({Event::Kind::kRemoved, Tier::kDevice, Reach::kUnsaid, false, 0, 0, 1});
  b.apply("w", 0, removed);
  CHECK(a.content("w")->digest != b.content("w")->digest);
  store(b, "w", {2});
  CHECK(a.content("w")->digest == b.content("w")->digest && a.content("w")->digest != 0);
  CHECK(a.content("w")->blocks == 3);
  store(b, "w", {2});  // one more copy
  CHECK(a.content("w")->digest != b.content("w")->digest && b.content("w")->blocks == 3);
  CHECK(!a.content("nobody"));

  Table tier(kMany, true), rank(kMany, true), group(kMany, true);
  EventBatch batch;
  batch.hashes = {1, 2, 3};
  batch.events.push_back({Event::Kind::kStored, Tier::kHost, Reach::kWhole, false, 0, 0, 3});
  tier.apply("w", 0, batch);
  batch.events[0].tier = Tier::kDevice;
  rank.apply("w", 1, batch);
  batch.events[0].group = 1;
  group.apply("w", 0, batch);
  Table plain(kMany, true);
  store(plain, "w", {1, 2, 3});
  for (const Table* one : {&tier, &rank, &group})
    CHECK(one->content("w")->digest != plain.content("w")->digest);
  CHECK(plain.clear("w", std::nullopt, kAllTiers));
  CHECK(plain.content("w")->digest == 0 && plain.content("w")->blocks == 0);
}

}  // namespace kvpool
