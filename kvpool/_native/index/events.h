// vLLM's KV-event batches, decoded from msgpack (vllm/distributed/kv_events.py):
//
// [timestamp, [event, ...], data_parallel_rank or nil, ...]
//
// An event is a map with a "type"; default fields may be absent. Before vLLM 0.24 it is an array that begins
// with the type. Tokens and other unneeded fields are skipped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "index/holders.h"

namespace kvpool {

// The part of a prefix that a KV-cache group needs to go on: all of it, the blocks of a sliding window, the
// last block (a state), or a part that events do not name (a chunk). Older publishers do not say.
enum class Reach : std::uint8_t { kUnsaid, kWhole, kWindow, kState, kPart };

struct Event {
  enum class Kind : std::uint8_t { kStored, kRemoved, kCleared };

  Kind kind;
  Tier tier = Tier::kDevice;
  Reach reach = Reach::kUnsaid;
  bool root = false;  // stored: the first block has no parent
  std::uint32_t group = 0;
  std::size_t begin = 0;  // of its hashes in EventBatch::hashes
  std::size_t count = 0;
  bool device_only = false;         // cleared: other tiers keep their blocks
  std::uint32_t block_tokens = 0;   // stored: of a block of the group; 0: unknown
  std::uint32_t window_tokens = 0;  // stored: of the sliding window, the token itself included; 0: unknown
  bool near = false;                // of a near pool, which engines of a host share; tier: where it lies
};

struct EventBatch {
  std::vector<Event> events;
  std::vector<std::uint64_t> hashes;
  std::optional<std::uint32_t> dp_rank;
  std::uint64_t skipped_events = 0;  // of an unknown type or medium
  // Stored, with hashes that also cover tokens behind their block: no prompt's hashes match.
  std::uint64_t lookahead_events = 0;
};

struct MalformedEvents : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A batch clears and stores more often than any engine does.
struct ClearedTooOften : MalformedEvents {
  using MalformedEvents::MalformedEvents;
};

inline constexpr std::size_t kMaxPayloadNbytes = std::size_t{64} << 20;
inline constexpr std::size_t kMaxBatchEvents = std::size_t{1} << 20;
inline constexpr std::size_t kMaxBatchHashes = std::size_t{1} << 22;
inline constexpr unsigned kMaxNesting = 16;
inline constexpr std::uint32_t kMaxGroup = 65535;
inline constexpr std::uint32_t kMaxDpRank = 65535;
inline constexpr std::uint32_t kMaxTokens = (1U << 31) - 1;  // of a block, of a sliding window

// Throws MalformedEvents, without a partial result.
EventBatch decode_events(std::span<const std::byte> payload);

}  // namespace kvpool
