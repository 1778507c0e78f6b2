// Counters shared by all connections of a store.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "key/record.h"

namespace kvpool {

struct RespCounts {
  std::array<std::atomic<std::uint64_t>, kDamageCount> damaged{};
  std::atomic<unsigned> up{0};
  std::atomic<std::uint64_t> connections{0};
  std::atomic<std::uint64_t> disconnections{0};
  std::atomic<std::uint64_t> failed_dials{0};
  std::atomic<std::uint64_t> refused{0};
  std::atomic<std::uint64_t> moved{0};  // followed redirects
  std::atomic<std::uint64_t> asked{0};
};

}  // namespace kvpool
