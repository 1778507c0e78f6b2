// One I/O thread's record of recently used keys of a server: their times to live are checked now and then.
//
// A table with a word per place: each remembers its last key. A forgotten key is checked again needlessly.
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
  // Checks per time to live.
  static constexpr int kLooks = 8;

  // True when a used key was not checked in the present span of `ttl` / kLooks; marks it as checked.
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
  static constexpr std::uint64_t kEpochs = 0xffff;    // in the bits implied by kPlaces

  std::vector<std::uint64_t> seen_;  // allocated at the first use
};

}  // namespace kvpool
