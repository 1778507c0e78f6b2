// Maps keys to servers: a key has one of 16,384 slots, a slot has a node. A single server is a topology of
// one node, and so is the sentinels' primary.
//
// Any thread may call any method. I/O threads read a snapshot and mark it stale; the waiting thread then asks
// the servers and installs the next.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "store/io_executor.h"
#include "store/resp_dial.h"
#include "store/resp_node.h"

namespace kvpool {

inline constexpr unsigned kSlots = 16384;
inline constexpr std::size_t kMaxNodes = 1000;  // the largest size recommended for both servers

// CRC16 (XMODEM) of the key, or of its text between the first { and the next } unless empty.
unsigned slot_of(std::string_view key);

struct NodeSlots {
  std::string host;
  unsigned port = 0;
  std::vector<std::pair<unsigned, unsigned>> ranges;  // first and last slot
};

// An immutable snapshot.
struct SlotMap {
  static constexpr std::uint16_t kNobody = 0xffff;

  std::vector<std::shared_ptr<RespNode>> nodes;
  std::vector<std::uint16_t> owners;  // kSlots indices into `nodes`, or kNobody; empty: the only node has all

  // The index in `nodes` of the key's server, or kNobody.
  std::size_t owner_of(std::string_view key) const { return owners.empty() ? 0 : owners[slot_of(key)]; }
};

class Topology {
 public:
  // No node is dialled before the first install(). `settings`: of every node, without its endpoint.
  explicit Topology(RespSettings settings);
  // A single server, for good.
  Topology(RespSettings settings, std::vector<SocketAddress> addresses);

  // Replaces the map. Blocks for the resolver on host names; a name without an address is an unreachable
  // node. Throws std::invalid_argument, because the input comes from servers.
  void install(const std::vector<NodeSlots>& nodes);

  std::shared_ptr<const SlotMap> map() const;
  // Changes with every install().
  std::uint64_t version() const { return version_.load(std::memory_order_acquire); }
  // Whether the only server is final.
  bool is_fixed() const { return fixed_; }

  // The node of a redirect; none for an unknown host name, because the resolver blocks.
  std::shared_ptr<RespNode> named(const std::string& host, unsigned port);

  // The map seems wrong. Cheap, never blocks.
  void mark_stale();
  // Blocks until mark_stale(), `until`, or close(); returns whether it was marked since the last call.
  bool wait_until_stale(Clock::time_point until);
  void close();
  bool closed() const;

 private:
  std::shared_ptr<RespNode> remembered(const Endpoint& endpoint) const;
  std::shared_ptr<RespNode> added(const Endpoint& endpoint, std::vector<SocketAddress> addresses);

  const RespSettings settings_;
  const bool fixed_;
  std::atomic<std::uint64_t> version_{1};
  std::atomic<bool> is_stale_{false};

  mutable std::mutex mutex_;  // guards the following fields
  std::condition_variable changed_;
  std::shared_ptr<const SlotMap> map_;
  // By name, so that all I/O threads share a server's state while any uses it.
  std::map<std::string, std::weak_ptr<RespNode>> nodes_;
  bool closed_ = false;
};

// Whether `host` is a valid name or number for a look-up: up to 253 letters, digits and . _ - :
bool is_host(std::string_view host);

}  // namespace kvpool
