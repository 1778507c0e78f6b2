// One server of a store, shared by all its I/O threads; a store's counters; an I/O thread's used keys.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "store/refused_size.h"
#include "store/resp_dial.h"

namespace kvpool {

// Of all connections of a store.
struct RespCounts {
  DamageCounts damaged;
  std::atomic<unsigned> up{0};
  std::atomic<std::uint64_t> connections{0};
  std::atomic<std::uint64_t> disconnections{0};
  std::atomic<std::uint64_t> failed_dials{0};
  std::atomic<std::uint64_t> refused{0};
  std::atomic<std::uint64_t> moved{0};  // followed redirects
  std::atomic<std::uint64_t> asked{0};
};

class RespNode {
 public:
  // `asks_resolver`: a failing connection asks the resolver; else the installer of topologies does.
  RespNode(RespSettings settings_, std::vector<SocketAddress> addresses, bool asks_resolver_)
      : settings(std::move(settings_)), asks_resolver(asks_resolver_), addresses_(std::move(addresses)) {}

  const RespSettings settings;
  const bool asks_resolver;
  std::atomic<unsigned> up{0};             // standing connections that are not suspect, of all I/O threads
  std::atomic<std::uint64_t> silences{0};  // number of its connections that fell silent
  std::atomic_flag resolving;              // an I/O thread is in the resolver, which may block it
  RefusedSize puts;                        // records whose puts, or gets, end its connections
  RefusedSize gets;

  std::vector<SocketAddress> addresses() const {
    const std::lock_guard lock(mutex_);
    return addresses_;
  }
  void set_addresses(std::vector<SocketAddress> addresses) {
    const std::lock_guard lock(mutex_);
    addresses_ = std::move(addresses);
  }

 private:
  mutable std::mutex mutex_;  // guards addresses_
  std::vector<SocketAddress> addresses_;
};

// One I/O thread's record of recently used keys of a server: their times to live are checked now and then. A
// table with a word per place: each remembers its last key. A forgotten key is checked again needlessly.
class RespUses {
 public:
  // Checks per time to live.
  static constexpr int kLooks = 96;
  // Of an expiring key, in spans between two checks: one is left to a key whose use was not checked.
  static constexpr int kSpansLeft = 2;

  static std::chrono::milliseconds shortened(std::chrono::milliseconds ttl) {
    return std::max(ttl / kLooks * kSpansLeft, std::chrono::milliseconds(1));
  }

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
  // Its next use is due.
  void forget(std::string_view key) {
    if (!seen_.empty()) seen_[std::hash<std::string_view>{}(key) % kPlaces] = 0;
  }

 private:
  static constexpr std::size_t kPlaces = 1 << 17;     // 1 MiB
  static constexpr std::uint64_t kUsed = 1ULL << 63;  // so that no mark is 0
  static constexpr std::uint64_t kEpochs = 0xffff;    // in the bits implied by kPlaces

  std::vector<std::uint64_t> seen_;  // allocated at the first use
};

}  // namespace kvpool
