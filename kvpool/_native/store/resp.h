// The backend for Redis or Valkey servers: each I/O thread has its own connections to each server, and routes
// items by key.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "store/io_executor.h"
#include "store/resp_dial.h"
#include "store/topology.h"

namespace kvpool {

class RespBackend : public Backend {
 public:
  // One server. Blocks for a connection. Throws Unreachable or RespError.
  explicit RespBackend(RespSettings settings);
  // The servers of `topology`, which the caller updates; closed with this. Never blocks.
  explicit RespBackend(std::shared_ptr<Topology> topology) : topology_(std::move(topology)) {}
  ~RespBackend() override { topology_->close(); }

  std::unique_ptr<IoThread> make_io_thread(unsigned index) override;
  void append_counters(Counters& counters) const override;
  // The address of the key's server.
  std::string shard_of(std::string_view key) const override;

 private:
  friend class RespIoThread;

  std::shared_ptr<Topology> topology_;
  RespCounts counts_;
};

}  // namespace kvpool
