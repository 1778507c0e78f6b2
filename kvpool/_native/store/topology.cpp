// The map of slots: install, lookup, staleness.
#include "store/topology.h"

#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <stdexcept>

namespace kvpool {
namespace {

constexpr std::size_t kCrcStep = 8;  // bytes at once: keys have over a hundred

// [i][byte]: the CRC of the byte and i zeros behind it.
constexpr auto make_crc_tables() {
  std::array<std::array<std::uint16_t, 256>, kCrcStep> tables{};
  for (unsigned byte = 0; byte < 256; ++byte) {
    unsigned value = byte << 8;
    for (std::size_t zeros = 0; zeros < kCrcStep; ++zeros) {
      for (int bit = 0; bit < 8; ++bit) value = (value & 0x8000U) != 0 ? (value << 1) ^ 0x1021U : value << 1;
      tables[zeros][byte] = static_cast<std::uint16_t>(value);
    }
  }
  return tables;
}

constexpr auto kCrcTables = make_crc_tables();

unsigned crc16(std::string_view text) {
  unsigned crc = 0;
  const auto byte_at = [&](std::size_t at) { return static_cast<unsigned char>(text[at]); };
  for (; text.size() >= kCrcStep; text.remove_prefix(kCrcStep)) {
    unsigned next = kCrcTables[7][byte_at(0) ^ (crc >> 8)] ^ kCrcTables[6][byte_at(1) ^ (crc & 0xffU)];
    for (std::size_t i = 2; i < kCrcStep; ++i) next ^= kCrcTables[kCrcStep - 1 - i][byte_at(i)];
    crc = next;
  }
  for (const char c : text) {
    crc = ((crc << 8) & 0xffffU) ^ kCrcTables[0][((crc >> 8) ^ static_cast<unsigned char>(c)) & 0xffU];
  }
  return crc;
}

bool is_number(const std::string& host) {
  std::array<unsigned char, sizeof(in6_addr)> address;
  return inet_pton(AF_INET, host.c_str(), address.data()) == 1 ||
         inet_pton(AF_INET6, host.c_str(), address.data()) == 1;
}

std::vector<SocketAddress> addresses_of(const Endpoint& endpoint) {
  try {
    return resolve(endpoint);
  } catch (const Unreachable&) {
    return {};
  }
}

Endpoint endpoint_of(const std::string& host, unsigned port) {
  return {host, static_cast<std::uint16_t>(port), {}};
}

void check(const std::vector<NodeSlots>& nodes) {
  if (nodes.empty() || nodes.size() > kMaxNodes)
    throw std::invalid_argument("a topology has 1 to 1000 nodes");
  for (const NodeSlots& node : nodes) {
    if (!is_host(node.host)) throw std::invalid_argument("a node's host is no host name");
    if (node.port < 1 || node.port > 65535) throw std::invalid_argument("a node's port is from 1 to 65535");
    for (const auto& [first, last] : node.ranges) {
      if (first > last || last >= kSlots) throw std::invalid_argument("slots are from 0 to 16383");
    }
  }
}

}  // namespace

unsigned slot_of(std::string_view key) {
  const std::size_t open = key.find('{');
  if (open != std::string_view::npos) {
    const std::size_t close = key.find('}', open + 1);
    if (close != std::string_view::npos && close != open + 1) key = key.substr(open + 1, close - open - 1);
  }
  return crc16(key) % kSlots;
}

bool is_host(std::string_view host) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '-' || c == '_' || c == ':';
  };
  return !host.empty() && host.size() <= 253 && std::all_of(host.begin(), host.end(), allowed);
}

Topology::Topology(RespSettings settings) : settings_(std::move(settings)), fixed_(false) {
  auto map = std::make_shared<SlotMap>();
  map->owners.assign(kSlots, SlotMap::kNobody);
  map_ = std::move(map);
}

Topology::Topology(RespSettings settings, std::vector<SocketAddress> addresses)
    : settings_(std::move(settings)), fixed_(true) {
  auto map = std::make_shared<SlotMap>();
  map->nodes.push_back(std::make_shared<RespNode>(settings_, std::move(addresses), true));
  map_ = std::move(map);
}

void Topology::install(const std::vector<NodeSlots>& nodes) {
  check(nodes);
  std::vector<std::vector<SocketAddress>> addresses;
  for (const NodeSlots& node : nodes) addresses.push_back(addresses_of(endpoint_of(node.host, node.port)));

  auto map = std::make_shared<SlotMap>();
  map->owners.assign(kSlots, SlotMap::kNobody);
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const Endpoint endpoint = endpoint_of(nodes[i].host, nodes[i].port);
    std::shared_ptr<RespNode> node = remembered(endpoint);
    if (!node) {
      node = added(endpoint, std::move(addresses[i]));
    } else if (!addresses[i].empty()) {
      node->set_addresses(std::move(addresses[i]));
    }
    map->nodes.push_back(std::move(node));
    for (const auto& [first, last] : nodes[i].ranges) {
      std::fill(map->owners.begin() + first, map->owners.begin() + last + 1, static_cast<std::uint16_t>(i));
    }
  }
  map_ = std::move(map);
  version_.fetch_add(1, std::memory_order_release);
}

std::shared_ptr<const SlotMap> Topology::map() const {
  const std::lock_guard lock(mutex_);
  return map_;
}

// Under the lock, as added().
std::shared_ptr<RespNode> Topology::remembered(const Endpoint& endpoint) const {
  const auto found = nodes_.find(endpoint.name());
  return found == nodes_.end() ? nullptr : found->second.lock();
}

std::shared_ptr<RespNode> Topology::added(const Endpoint& endpoint, std::vector<SocketAddress> addresses) {
  std::erase_if(nodes_, [](const auto& entry) { return entry.second.expired(); });
  RespSettings settings = settings_;
  settings.endpoint = endpoint;
  auto node = std::make_shared<RespNode>(std::move(settings), std::move(addresses), false);
  nodes_[endpoint.name()] = node;
  return node;
}

std::shared_ptr<RespNode> Topology::named(const std::string& host, unsigned port) {
  const Endpoint endpoint = endpoint_of(host, port);
  const std::lock_guard lock(mutex_);
  if (auto node = remembered(endpoint)) return node;
  return is_number(host) ? added(endpoint, addresses_of(endpoint)) : nullptr;
}

void Topology::mark_stale() {
  if (is_stale_.exchange(true, std::memory_order_relaxed)) return;
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
}

bool Topology::wait_until_stale(Clock::time_point until) {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, until, [this] { return closed_ || is_stale_.load(std::memory_order_relaxed); });
  return is_stale_.exchange(false, std::memory_order_relaxed) && !closed_;
}

void Topology::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

bool Topology::closed() const {
  const std::lock_guard lock(mutex_);
  return closed_;
}

}  // namespace kvpool
