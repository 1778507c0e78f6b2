// The backend for Redis or Valkey servers: each I/O thread has connections of its own to each of them.
// It takes an item and gives it to the connection to the server that holds the key.
#pragma once

#include <memory>
#include <utility>

#include "store/io_executor.h"
#include "store/resp_counts.h"
#include "store/resp_dial.h"
#include "store/topology.h"

namespace kvpool {

class RespBackend : public Backend {
 public:
  // One server. Blocks for one connection. Throws Unreachable or RespError.
  explicit RespBackend(RespSettings settings);
  // The servers of `topology`, which the caller keeps up to date; it is closed with this. Never blocks.
  explicit RespBackend(std::shared_ptr<Topology> topology) : topology_(std::move(topology)) {}
  ~RespBackend() override { topology_->close(); }

  std::unique_ptr<IoThread> make_io_thread(unsigned index) override;
  void append_counters(Counters& counters) const override;

 private:
  friend class RespIoThread;

  std::shared_ptr<Topology> topology_;
  RespCounts counts_;
};

}  // namespace kvpool
