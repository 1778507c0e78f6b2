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

// Where a server listens: a path, or a host and a port.
struct Endpoint {
  std::string host;
  std::uint16_t port = 0;
  std::string unix_path;  // when not empty, host and port are not used

  std::string name() const;  // "host:port" or the path
};

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t nbytes = 0;
};

// A server that cannot be reached: `error_number` is an errno, or 0 when a name has no address.
class Unreachable : public std::runtime_error {
 public:
  Unreachable(int error_number, const std::string& words)
      : std::runtime_error(words), error_number_(error_number) {}
  int error_number() const { return error_number_; }

 private:
  int error_number_;
};

// Blocks for as long as the system's resolver does, unless the host is a number or a path. Throws
// Unreachable.
std::vector<SocketAddress> resolve(const Endpoint& endpoint);

// A non-blocking socket on its way to the address. Returns none and sets `error_number` when that fails at
// once.
Descriptor begin_connect(const SocketAddress& address, int& error_number);

// The shortest round trip that this connection has seen; zero where that is not known, as on a Unix socket.
std::chrono::microseconds shortest_round_trip(int fd);

// Whether the connection stands; nothing is known yet when `under_way`. Never blocks.
bool connected(int fd, bool& under_way, int& error_number);

}  // namespace kvpool
