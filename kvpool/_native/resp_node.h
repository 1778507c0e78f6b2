// One server of a store, as all its lanes see it.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "record.h"
#include "resp_dial.h"

namespace kvpool {

struct RespNode {
  explicit RespNode(RespSettings settings_) : settings(std::move(settings_)) {}

  const RespSettings settings;
  std::atomic<unsigned> up{0};  // connections that stand, of all lanes
};

// What all connections of a store count together.
struct RespCounts {
  std::array<std::atomic<std::uint64_t>, kDamageCount> damaged{};
  std::atomic<unsigned> up{0};
  std::atomic<std::uint64_t> connections{0};
  std::atomic<std::uint64_t> disconnections{0};
  std::atomic<std::uint64_t> failed_dials{0};
};

}  // namespace kvpool
