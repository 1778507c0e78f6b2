// The plain loops over a server and over a directory.
#include "store/bare.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <functional>
#include <initializer_list>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <thread>

#include "store/resp_dial.h"

namespace kvpool {
namespace {

constexpr int kPatience_s = 30;
// As the stores bound theirs; large values want two outstanding (2 MiB GETs of Redis 7.0.15: 2.7 GB/s with one, 3.2 with
// two, 1.5 with 64).
constexpr std::size_t kWindowNbytes = 1 << 20;

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

iovec part(const void* at, std::size_t nbytes) { return {const_cast<void*>(at), nbytes}; }

// All of the parts, in either direction.
void move_all(int fd, std::initializer_list<iovec> wanted, bool out) {
  std::vector<iovec> parts(wanted);
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  while (message.msg_iovlen != 0) {
    const ssize_t n = out ? sendmsg(fd, &message, MSG_NOSIGNAL) : recvmsg(fd, &message, MSG_WAITALL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(out ? "send" : "receive");
    if (n == 0) throw std::runtime_error("the server closed the connection");
    auto left = static_cast<std::size_t>(n);
    while (message.msg_iovlen != 0 && left >= message.msg_iov->iov_len) {
      left -= message.msg_iov->iov_len;
      ++message.msg_iov;
      --message.msg_iovlen;
    }
    if (message.msg_iovlen != 0) {
      message.msg_iov->iov_base = static_cast<char*>(message.msg_iov->iov_base) + left;
      message.msg_iov->iov_len -= left;
    }
  }
}

void send_text(int fd, std::string_view text) { move_all(fd, {part(text.data(), text.size())}, true); }

void expect(int fd, std::string_view reply) {
  std::string got(reply.size(), '\0');
  move_all(fd, {part(got.data(), got.size())}, false);
  if (got != reply) throw std::runtime_error("the server answered something else than a bare loop expects");
}

std::string command(std::initializer_list<std::string_view> words) {
  std::string text;
  append_command(text, words);
  return text;
}

std::string bulk_line(std::size_t nbytes) {
  std::string line("$");
  line.append(std::to_string(nbytes)).append("\r\n");
  return line;
}

Descriptor connect_to(const SocketAddress& address) {
  int error_number = 0;
  Descriptor fd = begin_connect(address, error_number);
  if (!fd) throw Unreachable(error_number, "cannot connect");
  pollfd asked{fd.get(), POLLOUT, 0};
  bool under_way = false;
  if (poll(&asked, 1, kPatience_s * 1000) != 1 || !connected(fd.get(), under_way, error_number)) {
    throw Unreachable(error_number, "cannot connect");
  }
  const timeval patience{kPatience_s, 0};
  if (fcntl(fd.get(), F_SETFL, 0) != 0 ||
      setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience) != 0 ||
      setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience) != 0) {
    fail("socket");
  }
  return fd;
}

std::size_t window_of(std::size_t nbytes) {
  return std::max<std::size_t>(2, kWindowNbytes / std::max<std::size_t>(nbytes, 1));
}

// Runs work(0), work(1) ... side by side; throws what the first of them threw.
void side_by_side(std::size_t count, const std::function<void(std::size_t)>& work) {
  std::vector<std::exception_ptr> failures(count);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      try {
        work(i);
      } catch (...) {
        failures[i] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

void put_some(int fd, const std::vector<std::string>& keys, const BareBuffers& buffers, std::size_t first,
              std::size_t step) {
  constexpr std::string_view kStored = "+OK\r\n";
  std::size_t unanswered = 0;
  for (std::size_t i = first; i < keys.size(); i += step) {
    if (unanswered == window_of(buffers[i].size())) {
      expect(fd, kStored);
      --unanswered;
    }
    std::string head("*3\r\n$3\r\nSET\r\n");
    head.append(bulk_line(keys[i].size()))
        .append(keys[i])
        .append("\r\n")
        .append(bulk_line(buffers[i].size()));
    move_all(fd,
             {part(head.data(), head.size()), part(buffers[i].data(), buffers[i].size()), part("\r\n", 2)},
             true);
    ++unanswered;
  }
  for (; unanswered != 0; --unanswered) expect(fd, kStored);
}

void get_some(int fd, const std::vector<std::string>& keys, const BareBuffers& buffers, std::size_t first,
              std::size_t step) {
  std::size_t asked = first;
  std::size_t outstanding = 0;
  for (std::size_t i = first; i < keys.size(); i += step) {
    for (; asked < keys.size() && outstanding < window_of(buffers[i].size()); asked += step, ++outstanding) {
      send_text(fd, command({"GET", keys[asked]}));
    }
    const std::string head = bulk_line(buffers[i].size());
    std::string got(head.size() + 2, '\0');
    move_all(fd,
             {part(got.data(), head.size()), part(buffers[i].data(), buffers[i].size()),
              part(got.data() + head.size(), 2)},
             false);
    if (!got.starts_with(head) || !got.ends_with("\r\n"))
      throw std::runtime_error("the server answered something else than a value of this size");
    --outstanding;
  }
}

}  // namespace

BareServer::BareServer(const Endpoint& endpoint, const std::string& user, const std::string& password,
                       unsigned database, unsigned connections) {
  const SocketAddress address = resolve(endpoint).front();
  for (unsigned i = 0; i < connections; ++i) {
    const int fd = connections_.emplace_back(connect_to(address)).get();
    if (!password.empty()) {
      send_text(fd, user.empty() ? command({"AUTH", password}) : command({"AUTH", user, password}));
      expect(fd, "+OK\r\n");
    }
    send_text(fd, command({"SELECT", std::to_string(database)}));
    expect(fd, "+OK\r\n");
  }
}

void BareServer::put(const std::vector<std::string>& keys, const BareBuffers& buffers) {
  side_by_side(connections_.size(), [&](std::size_t i) {
    put_some(connections_[i].get(), keys, buffers, i, connections_.size());
  });
}

void BareServer::get(const std::vector<std::string>& keys, const BareBuffers& buffers) {
  side_by_side(connections_.size(), [&](std::size_t i) {
    get_some(connections_[i].get(), keys, buffers, i, connections_.size());
  });
}

BareFiles::BareFiles(std::filesystem::path folder, unsigned threads)
    : folder_(std::move(folder)), threads_(threads) {}

void BareFiles::put(const std::vector<std::string>& names, const BareBuffers& buffers) {
  side_by_side(threads_, [&](std::size_t first) {
    for (std::size_t i = first; i < names.size(); i += threads_) {
      const Descriptor fd(open((folder_ / names[i]).c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
      if (!fd) fail("open");
      for (std::size_t done = 0; done < buffers[i].size();) {
        const ssize_t n =
            pwrite(fd.get(), buffers[i].data() + done, buffers[i].size() - done, static_cast<off_t>(done));
        if (n <= 0) fail("pwrite");
        done += static_cast<std::size_t>(n);
      }
    }
  });
}

void BareFiles::get(const std::vector<std::string>& names, const BareBuffers& buffers) {
  side_by_side(threads_, [&](std::size_t first) {
    for (std::size_t i = first; i < names.size(); i += threads_) {
      const Descriptor fd(open((folder_ / names[i]).c_str(), O_RDONLY | O_CLOEXEC));
      if (!fd) fail("open");
      for (std::size_t done = 0; done < buffers[i].size();) {
        const ssize_t n =
            pread(fd.get(), buffers[i].data() + done, buffers[i].size() - done, static_cast<off_t>(done));
        if (n == 0) throw std::runtime_error("a file is shorter than what was written to it");
        if (n < 0) fail("pread");
        done += static_cast<std::size_t>(n);
      }
    }
  });
}

}  // namespace kvpool
