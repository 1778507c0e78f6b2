// Which keys of a server were used of late, as one I/O thread knows it: so that the time to live of a key in use is looked
// at now and then, and not at each use.
//
// A table of one word a place: the last key of a place is remembered. What was forgotten is looked at once more
// than it had to be.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string_view>
#include <utility>
#include <vector>

#include "store/io_executor.h"

namespace kvpool {

class RespUses {
 public:
  // Keys are looked at once in each eighth of their time to live.
  static constexpr int kLooks = 8;

  // True when the key, which is in use, was not looked at in the present span of `ttl` / kLooks; it counts as looked
  // at from now on.
  bool is_due(std::string_view key, std::chrono::milliseconds ttl, Clock::time_point now) {
    if (seen_.empty()) seen_.resize(kPlaces);
    const auto span = std::max<Clock::duration>(ttl / kLooks, std::chrono::milliseconds(1));
    const auto epoch = static_cast<std::uint64_t>(now.time_since_epoch() / span);
    const std::uint64_t hash = std::hash<std::string_view>{}(key);
    std::uint64_t& place = seen_[hash % kPlaces];
    const std::uint64_t mark = ((hash & ~kEpochs) | (epoch & kEpochs)) | kUsed;
    return std::exchange(place, mark) != mark;
  }

 private:
  static constexpr std::size_t kPlaces = 1 << 17;     // 1 MiB
  static constexpr std::uint64_t kUsed = 1ULL << 63;  // so that no mark is 0
  static constexpr std::uint64_t kEpochs = 0xffff;    // in the place of bits that kPlaces implies

  std::vector<std::uint64_t> seen_;  // made at the first use
};

}  // namespace kvpool
