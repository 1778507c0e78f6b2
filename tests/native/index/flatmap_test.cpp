// The map against a plain one, how it grows, evicts and is swept.
#include "index/flatmap.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <unordered_map>
#include <vector>

#include "check.h"

namespace kvpool {
namespace {

void check_equal(FlatMap& map, const std::unordered_map<std::uint64_t, std::uint32_t>& model) {
  CHECK(map.size() == model.size());
  for (const auto& [key, value] : model) {
    const std::uint32_t* found = map.find(key);
    CHECK(found != nullptr && *found == value);
  }
}

}  // namespace

TEST(flatmap_does_what_a_map_does) {
  std::mt19937_64 chance(1);
  FlatMap map(chance());
  std::unordered_map<std::uint64_t, std::uint32_t> model;
  // Keys of a small range, so that they come again; more of them than one segment has places.
  for (int step = 0; step < 400'000; ++step) {
    const std::uint64_t key = chance() % 20'000;
    const auto value = static_cast<std::uint32_t>(step);
    if (chance() % 100 < (step / 50'000 % 2 == 0 ? 70U : 30U)) {
      const auto [place, is_new] = map.insert(key, value);
      CHECK(place != nullptr && is_new == model.emplace(key, value).second);
      CHECK(*place == model[key]);
    } else {
      CHECK(map.erase(key) == (model.erase(key) == 1));
    }
    CHECK(map.find(chance() | 1ULL << 63) == nullptr);
  }
  check_equal(map, model);
}

// The smallest segment after so many erasures that every bucket was passed by something: a search must end.
TEST(flatmap_searches_end_in_a_worn_segment) {
  std::mt19937_64 chance(2);
  FlatMap map(chance());
  std::vector<std::uint64_t> keys;
  for (int step = 0; step < 200'000; ++step) {
    if (keys.size() < 17) {
      keys.push_back(chance());
      CHECK(map.insert(keys.back(), 1).second);
    } else {
      std::swap(keys[chance() % keys.size()], keys.back());
      CHECK(map.erase(keys.back()));
      keys.pop_back();
    }
    CHECK(map.find(chance()) == nullptr);
  }
  for (const std::uint64_t key : keys) CHECK(map.find(key) != nullptr);
  // No erasure left a trace: or searches would become as long as the segment.
  for (const std::uint64_t key : keys) CHECK(map.erase(key));
  CHECK(map.size() == 0 && map.passes() == 0);
}

TEST(flatmap_grows_in_small_steps) {
  FlatMap map(3);
  std::size_t before = map.nbytes();
  std::size_t largest = 0;
  for (std::uint64_t key = 0; key < 300'000; ++key) {
    map.insert(key, 0);
    const std::size_t now = map.nbytes();
    largest = std::max(largest, now - before);
    before = now;
  }
  // Two segments for one, and now and then a directory of a few hundred entrances.
  CHECK(largest < 80'000);
  CHECK(map.nbytes() < 300'000 * 32);
}

TEST(flatmap_evicts_what_is_neither_new_nor_touched) {
  const auto never = [](std::uint32_t) { return false; };
  FlatMap map(5);
  for (std::uint64_t key = 0; key < 2000; ++key) CHECK(map.insert(key, 0).second);
  const std::size_t nbytes = map.nbytes();
  for (std::uint64_t key = 2000; key < 40'000; ++key) {
    for (std::uint64_t hot = key % 4; hot < 500 && key % 100 < 4; hot += 4) CHECK(map.touch(hot) != nullptr);
    if (map.insert(key, 0, false).first != nullptr) continue;
    bool called = false;
    const bool gone = map.evict(key, never, [&](std::uint64_t cold, std::uint32_t) {
      CHECK(cold >= 500 && map.find(cold) != nullptr);
      called = true;
    });
    CHECK(called && gone);
    CHECK(map.insert(key, 0, false).second);
  }
  CHECK(map.nbytes() == nbytes);
  // All touched: somebody leaves all the same.
  for (std::uint64_t key = 0; key < 40'000; ++key) map.touch(key);
  CHECK(map.evict(1, never, [](std::uint64_t, std::uint32_t) {}));
  FlatMap empty(6);
  CHECK(!empty.evict(1, never, [](std::uint64_t, std::uint32_t) {}));
}

TEST(flatmap_sweep_meets_every_entry_once) {
  FlatMap map(4);
  for (std::uint64_t key = 0; key < 50'000; ++key) map.insert(key, static_cast<std::uint32_t>(key));
  std::uint64_t cursor = 0;
  std::size_t met = 0;
  do {
    map.visit_segment(cursor, [&](std::uint64_t key, std::uint32_t value) {
      ++met;
      if (value % 3 == 0) map.erase(key);
    });
  } while (cursor != 0);
  CHECK(met == 50'000);
  CHECK(map.size() == 33'333);
  for (std::uint64_t key = 0; key < 50'000; ++key) CHECK((map.find(key) == nullptr) == (key % 3 == 0));
}

}  // namespace kvpool
