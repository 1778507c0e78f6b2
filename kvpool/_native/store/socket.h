// Addresses, and stream sockets that never block.
#pragma once

#include <sys/socket.h>

#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "store/descriptor.h"

namespace kvpool {

// A server's address: a path, or a host and a port.
struct Endpoint {
  std::string host;
  std::uint16_t port = 0;
  std::string unix_path;  // not empty: host and port are unused

  std::string name() const;  // "host:port" or the path
};

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t nbytes = 0;
};

// An unreachable server: `error_number` is an errno, or 0 for a name without an address.
class Unreachable : public std::runtime_error {
 public:
  Unreachable(int error_number, const std::string& words)
      : std::runtime_error(words), error_number_(error_number) {}
  int error_number() const { return error_number_; }

 private:
  int error_number_;
};

// Blocks as the system's resolver does, except for a numeric host or a path. Throws Unreachable.
std::vector<SocketAddress> resolve(const Endpoint& endpoint);

// A non-blocking socket connecting to the address. On immediate failure returns none and sets `error_number`.
Descriptor begin_connect(const SocketAddress& address, int& error_number);

// The connection's shortest round trip; zero if unknown, as on a Unix socket.
std::chrono::microseconds shortest_round_trip(int fd);

// Whether the connection stands; undecided while `under_way`. Never blocks.
bool connected(int fd, bool& under_way, int& error_number);

}  // namespace kvpool
