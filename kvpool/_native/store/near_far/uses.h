// When the next use of each key is worth telling: a table of a bounded size. One thread.
//
// A place remembers a key by a part of its hash. Of four keys that share a set the one that is due first makes room:
// a forgotten use is told again, needlessly.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <ratio>
#include <string_view>
#include <vector>

#include "store/io_executor.h"

namespace kvpool {

class Uses {
 public:
  enum class Due : std::uint8_t {
    kNot,
    kFirst,  // nothing is known of the key, or that far did not take it
    kAgain,  // far had it
  };

  Due due(std::string_view key, Clock::time_point now) const {
    if (sets_.empty()) return Due::kFirst;
    const std::uint64_t hash = hash_of(key);
    for (const Place& place : set_of(hash)) {
      if (!place.is(hash)) continue;
      if (place.left(ticks(now)) > 0) return Due::kNot;
      return (place.mark & kWasFar) != 0 ? Due::kAgain : Due::kFirst;
    }
    return Due::kFirst;
  }
  // Its next use is due then.
  void set(std::string_view key, Clock::time_point at, bool was_far) {
    if (sets_.empty()) sets_.resize(kSets);
    const std::uint64_t hash = hash_of(key);
    auto& set = set_of(hash);
    auto place = std::ranges::find_if(set, [hash](const Place& one) { return one.is(hash); });
    if (place == set.end()) {
      const std::uint32_t now = ticks(Clock::now());
      place = std::ranges::min_element(
          set, {}, [now](const Place& one) { return one.mark == 0 ? INT32_MIN : one.left(now); });
    }
    *place = {mark_of(hash) | (was_far ? kWasFar : 0), ticks(at)};
  }
  void forget(std::string_view key) {
    if (sets_.empty()) return;
    const std::uint64_t hash = hash_of(key);
    for (Place& place : set_of(hash)) {
      if (place.is(hash)) place = {};
    }
  }

 private:
  static constexpr std::size_t kSets = 1 << 16;  // of 4 places: 262,144 keys in 2 MiB
  static constexpr std::uint32_t kWasFar = 1;
  static constexpr std::uint32_t kUsed = 2;  // so that no mark is 0

  struct Place {
    std::uint32_t mark = 0;
    std::uint32_t due = 0;  // ticks

    bool is(std::uint64_t hash) const { return (mark & ~kWasFar) == mark_of(hash); }
    // Times are compared around the wrap: one is past for 3.4 years.
    std::int32_t left(std::uint32_t now) const { return static_cast<std::int32_t>(due - now); }
  };

  static std::uint64_t hash_of(std::string_view key) { return std::hash<std::string_view>{}(key); }
  static std::uint32_t mark_of(std::uint64_t hash) {
    return (static_cast<std::uint32_t>(hash >> 32) | kUsed) & ~kWasFar;
  }
  // Of a twentieth of a second: of a millisecond, one would be to come again after 25 days.
  static std::uint32_t ticks(Clock::time_point at) {
    using Tick = std::chrono::duration<std::int64_t, std::ratio<1, 20>>;
    return static_cast<std::uint32_t>(std::chrono::duration_cast<Tick>(at.time_since_epoch()).count());
  }
  std::array<Place, 4>& set_of(std::uint64_t hash) { return sets_[hash % kSets]; }
  const std::array<Place, 4>& set_of(std::uint64_t hash) const { return sets_[hash % kSets]; }

  std::vector<std::array<Place, 4>> sets_;  // allocated at the first use
};

}  // namespace kvpool
