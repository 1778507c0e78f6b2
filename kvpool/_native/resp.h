// The backend for a Redis or Valkey server: one connection a lane, payloads between socket and caller's
// buffer.
//
// A record is one HASH key (docs/stores.md):
//   h   the record's header, then the last min(128, n) bytes of the payload
//   b   the payload bytes before those; an empty string when there are none
//
// PUT asks HSET key b ... h ..., then PEXPIRE. The header holds the checksum of the whole payload, so it has
// to be sent last for a chunk to be hashed just before it is sent: hence b before h. The server sees both or
// nothing. GET asks HMGET key h b: there the header comes first, and each chunk of b is hashed as it arrives.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine.h"
#include "resp_dial.h"

namespace kvpool {

inline constexpr std::size_t kRespTailNbytes = 128;

class RespBackend : public Backend {
 public:
  // Blocks for one connection. Throws Unreachable or RespError.
  explicit RespBackend(RespSettings settings);

  std::unique_ptr<Lane> make_lane(unsigned index) override;
  void append_counters(Counters& counters) const override;

 private:
  friend class RespLane;

  const RespSettings settings_;
  const std::vector<SocketAddress> addresses_;  // as of the start; a lane that fails asks for them again
  std::atomic<unsigned> up_lanes_{0};           // lanes whose connection stands
  std::array<std::atomic<std::uint64_t>, kDamageCount> damaged_{};
  std::atomic<std::uint64_t> connections_{0};
  std::atomic<std::uint64_t> disconnections_{0};
  std::atomic<std::uint64_t> failed_dials_{0};
};

}  // namespace kvpool
