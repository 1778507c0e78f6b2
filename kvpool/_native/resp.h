// The backend for a Redis or Valkey server: each lane is a thread with a connection of its own.
#pragma once

#include <memory>
#include <vector>

#include "engine.h"
#include "resp_dial.h"
#include "resp_node.h"

namespace kvpool {

class RespBackend : public Backend {
 public:
  // Blocks for one connection. Throws Unreachable or RespError.
  explicit RespBackend(RespSettings settings);

  std::unique_ptr<Lane> make_lane(unsigned index) override;
  void append_counters(Counters& counters) const override;

 private:
  friend class RespLane;

  RespNode node_;
  const std::vector<SocketAddress>
      addresses_;  // as of the start; a connection that fails asks for them again
  RespCounts counts_;
};

}  // namespace kvpool
