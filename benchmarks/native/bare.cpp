#include "bare.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <functional>
#include <initializer_list>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <thread>

namespace bare {
namespace {

// As the stores bound theirs; large values want two outstanding (2 MiB GETs of Redis 7.0.15: 2.7 GB/s with one, 3.2 with
// two, 1.5 with 64).
constexpr std::size_t kWindowNbytes = 1 << 20;

struct File {
  int fd;
  ~File() {
    if (fd >= 0) close(fd);
  }
};

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

void expect(int fd, std::string_view reply) {
  std::string got(reply.size(), '\0');
  move_all(fd, {part(got.data(), got.size())}, false);
  if (got != reply) throw std::runtime_error("the server answered something else than a bare loop expects");
}

std::string bulk_line(std::size_t nbytes) {
  std::string line("$");
  line.append(std::to_string(nbytes)).append("\r\n");
  return line;
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

void put_some(int fd, const std::vector<std::string>& keys, const Buffers& buffers, std::size_t first,
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

void get_some(int fd, const std::vector<std::string>& keys, const Buffers& buffers, std::size_t first,
              std::size_t step) {
  std::size_t asked = first;
  std::size_t outstanding = 0;
  for (std::size_t i = first; i < keys.size(); i += step) {
    for (; asked < keys.size() && outstanding < window_of(buffers[i].size()); asked += step, ++outstanding) {
      const std::string text = "*2\r\n$3\r\nGET\r\n" + bulk_line(keys[asked].size()) + keys[asked] + "\r\n";
      move_all(fd, {part(text.data(), text.size())}, true);
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

void put_values(const std::vector<int>& connections, const std::vector<std::string>& keys,
                const Buffers& buffers) {
  side_by_side(connections.size(),
               [&](std::size_t i) { put_some(connections[i], keys, buffers, i, connections.size()); });
}

void get_values(const std::vector<int>& connections, const std::vector<std::string>& keys,
                const Buffers& buffers) {
  side_by_side(connections.size(),
               [&](std::size_t i) { get_some(connections[i], keys, buffers, i, connections.size()); });
}

void write_files(const std::vector<std::string>& paths, const Buffers& buffers, unsigned threads,
                 bool direct) {
  const int how = direct ? O_DIRECT : O_TRUNC;
  side_by_side(threads, [&](std::size_t first) {
    for (std::size_t i = first; i < paths.size(); i += threads) {
      const File file{open(paths[i].c_str(), O_WRONLY | O_CREAT | how | O_CLOEXEC, 0600)};
      if (file.fd < 0) fail("open");
      for (std::size_t done = 0; done < buffers[i].size();) {
        const ssize_t n =
            pwrite(file.fd, buffers[i].data() + done, buffers[i].size() - done, static_cast<off_t>(done));
        if (n <= 0) fail("pwrite");
        done += static_cast<std::size_t>(n);
      }
    }
  });
}

void read_files(const std::vector<std::string>& paths, const Buffers& buffers, unsigned threads,
                bool direct) {
  side_by_side(threads, [&](std::size_t first) {
    for (std::size_t i = first; i < paths.size(); i += threads) {
      const File file{open(paths[i].c_str(), O_RDONLY | O_CLOEXEC | (direct ? O_DIRECT : 0))};
      if (file.fd < 0) fail("open");
      for (std::size_t done = 0; done < buffers[i].size();) {
        const ssize_t n =
            pread(file.fd, buffers[i].data() + done, buffers[i].size() - done, static_cast<off_t>(done));
        if (n == 0) throw std::runtime_error("a file is shorter than what was written to it");
        if (n < 0) fail("pread");
        done += static_cast<std::size_t>(n);
      }
    }
  });
}

}  // namespace bare
