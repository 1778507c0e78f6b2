// Which server holds which keys: one of 16,384 slots a key, one node a slot. One plain server is a topology
// of one node, and so is the primary that sentinels name.
//
// Any thread may call any method. I/O threads read a snapshot and say when it seems to be wrong; the thread that waits for
// that asks the servers and installs the next one.
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
inline constexpr std::size_t kMaxNodes = 1000;  // what the makers of both servers name as the most

// CRC16 (XMODEM) of the key, or of what stands between its first { and the next } when that is not empty.
unsigned slot_of(std::string_view key);

struct NodeSlots {
  std::string host;
  unsigned port = 0;
  std::vector<std::pair<unsigned, unsigned>> ranges;  // first and last slot
};

// A snapshot; never changes.
struct SlotMap {
  static constexpr std::uint16_t kNobody = 0xffff;

  std::vector<std::shared_ptr<RespNode>> nodes;
  std::vector<std::uint16_t> owners;  // kSlots places in `nodes`, or kNobody; empty: the only node has all

  // The place in `nodes` of who holds the key, or kNobody.
  std::size_t owner_of(std::string_view key) const { return owners.empty() ? 0 : owners[slot_of(key)]; }
};

class Topology {
 public:
  // No node is asked before the first install(). `settings`: of every node, but for its endpoint.
  explicit Topology(RespSettings settings);
  // One server that stays the only one.
  Topology(RespSettings settings, std::vector<SocketAddress> addresses);

  // Takes the place of what was known. Blocks for the resolver where a host is a name; a name without an
  // address is a node that cannot be reached. Throws std::invalid_argument: these are words from outside.
  void install(const std::vector<NodeSlots>& nodes);

  std::shared_ptr<const SlotMap> map() const;
  // Changes with every install().
  std::uint64_t version() const { return version_.load(std::memory_order_acquire); }
  // Whether keys may be found on other servers than the first.
  bool is_fixed() const { return fixed_; }

  // The node that a redirect names; none when it is not known and its host is a name: the resolver blocks.
  std::shared_ptr<RespNode> named(const std::string& host, unsigned port);

  // What is known seems to be wrong. Cheap, never blocks.
  void mark_stale();
  // Blocks until mark_stale() is called, until `until`, or until close(); whether it was called since the last time.
  bool wait_until_stale(Clock::time_point until);
  void close();
  bool closed() const;

 private:
  std::shared_ptr<RespNode> remembered(const std::string& name);

  const RespSettings settings_;
  const bool fixed_;
  std::atomic<std::uint64_t> version_{1};
  std::atomic<bool> is_stale_{false};

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::shared_ptr<const SlotMap> map_;
  // By name, so that all I/O threads share what they know of a server for as long as one of them uses it.
  std::map<std::string, std::weak_ptr<RespNode>> nodes_;
  bool closed_ = false;
};

// Whether `host` is a name or a number that may be looked up: up to 253 letters, digits and . _ - :
bool is_host(std::string_view host);

}  // namespace kvpool
