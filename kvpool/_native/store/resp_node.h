// One server of a store, shared by all its I/O threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "store/resp_dial.h"

namespace kvpool {

class RespNode {
 public:
  // `asks_resolver`: a failing connection asks the resolver; else the installer of topologies does.
  RespNode(RespSettings settings_, std::vector<SocketAddress> addresses, bool asks_resolver_)
      : settings(std::move(settings_)), asks_resolver(asks_resolver_), addresses_(std::move(addresses)) {}

  const RespSettings settings;
  const bool asks_resolver;
  std::atomic<unsigned> up{0};             // standing connections that are not suspect, of all I/O threads
  std::atomic<std::uint64_t> silences{0};  // number of its connections that fell silent
  std::atomic_flag resolving;              // an I/O thread is in the resolver, which may block it

  std::vector<SocketAddress> addresses() const {
    const std::lock_guard lock(mutex_);
    return addresses_;
  }
  void set_addresses(std::vector<SocketAddress> addresses) {
    const std::lock_guard lock(mutex_);
    addresses_ = std::move(addresses);
  }

 private:
  mutable std::mutex mutex_;  // guards addresses_
  std::vector<SocketAddress> addresses_;
};

}  // namespace kvpool
