// Resolves names; opens, connects and configures sockets.
#include "store/socket.h"

#include <linux/tcp.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <system_error>

namespace kvpool {

std::string Endpoint::name() const {
  if (!unix_path.empty()) return unix_path;
  const bool v6 = host.find(':') != std::string::npos;
  return (v6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

std::vector<SocketAddress> resolve(const Endpoint& endpoint) {
  std::vector<SocketAddress> addresses;
  if (!endpoint.unix_path.empty()) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (endpoint.unix_path.size() >= sizeof address.sun_path) {
      throw Unreachable(ENAMETOOLONG, endpoint.name() + ": a socket's path has at most 107 bytes");
    }
    std::memcpy(address.sun_path, endpoint.unix_path.c_str(), endpoint.unix_path.size() + 1);
    SocketAddress& added = addresses.emplace_back();
    std::memcpy(&added.storage, &address, sizeof address);
    added.nbytes = sizeof address;
    return addresses;
  }
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int failed = getaddrinfo(endpoint.host.c_str(), std::to_string(endpoint.port).c_str(), &hints, &list);
  if (failed != 0) {
    const int error_number = failed == EAI_SYSTEM ? errno : 0;
    throw Unreachable(error_number, endpoint.name() + ": " + gai_strerror(failed));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owned(list, &freeaddrinfo);
  for (const addrinfo* one = list; one != nullptr; one = one->ai_next) {
    if (one->ai_addrlen > sizeof(sockaddr_storage)) continue;
    SocketAddress& added = addresses.emplace_back();
    std::memcpy(&added.storage, one->ai_addr, one->ai_addrlen);
    added.nbytes = one->ai_addrlen;
  }
  if (addresses.empty()) throw Unreachable(0, endpoint.name() + ": the name has no address");
  return addresses;
}

Descriptor begin_connect(const SocketAddress& address, int& error_number) {
  const int family = address.storage.ss_family;
  Descriptor fd(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) {
    error_number = errno;
    return {};
  }
  const int on = 1;
  if (family != AF_UNIX) {
    // Requests are written whole: a delay would only add a round trip.
    setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  }
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address.storage), address.nbytes) != 0 &&
      errno != EINPROGRESS) {
    error_number = errno;
    return {};
  }
  return fd;
}

std::chrono::microseconds shortest_round_trip(int fd) {
  tcp_info info{};
  socklen_t nbytes = sizeof info;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &nbytes) != 0) return {};
  return std::chrono::microseconds(info.tcpi_min_rtt);
}

bool connected(int fd, bool& under_way, int& error_number) {
  pollfd asked{fd, POLLOUT, 0};
  under_way = false;
  error_number = 0;
  const int ready = poll(&asked, 1, 0);
  if (ready == 0 || (ready < 0 && errno == EINTR)) {
    under_way = true;
    return false;
  }
  socklen_t nbytes = sizeof error_number;
  if (ready < 0 || getsockopt(fd, SOL_SOCKET, SO_ERROR, &error_number, &nbytes) != 0) error_number = errno;
  return error_number == 0;
}

}  // namespace kvpool
