// The server of the tests: what it reads and answers.
#include "store/resp_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <memory>

#include "check.h"

namespace kvpool::test {

std::string bulk(std::string_view text) {
  return "$" + std::to_string(text.size()) + "\r\n" + std::string(text) + "\r\n";
}

bool Peer::fill() {
  char piece[65536];
  const ssize_t n = recv(fd_.get(), piece, sizeof piece, 0);
  if (n <= 0) return false;
  buffer_.append(piece, static_cast<std::size_t>(n));
  return true;
}

bool Peer::read(Command& command) {
  command.clear();
  std::size_t at = 0;
  const auto line = [&](std::string& text) {
    std::size_t end;
    while ((end = buffer_.find("\r\n", at)) == std::string::npos) {
      if (!fill()) return false;
    }
    text = buffer_.substr(at, end - at);
    at = end + 2;
    return true;
  };
  std::string text;
  if (!line(text)) return false;
  CHECK(text[0] == '*');
  for (int left = std::stoi(text.substr(1)); left != 0; --left) {
    if (!line(text)) return false;
    CHECK(text[0] == '$');
    const auto nbytes = static_cast<std::size_t>(std::stoul(text.substr(1)));
    while (buffer_.size() < at + nbytes + 2) {
      if (!fill()) return false;
    }
    CHECK(buffer_.compare(at + nbytes, 2, "\r\n") == 0);
    command.push_back(buffer_.substr(at, nbytes));
    at += nbytes + 2;
  }
  buffer_.erase(0, at);
  return true;
}

void Peer::write(std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = send(fd_.get(), text.data(), text.size(), MSG_NOSIGNAL);
    if (n <= 0) return;
    text.remove_prefix(static_cast<std::size_t>(n));
  }
}

void Peer::hang_up() { shutdown(fd_.get(), SHUT_RDWR); }

RespServer::RespServer(Hook hook) : hook_(std::move(hook)) {
  listener_ = Descriptor(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  CHECK(bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  CHECK(listen(listener_.get(), 64) == 0);
  socklen_t nbytes = sizeof address;
  CHECK(getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &nbytes) == 0);
  port_ = ntohs(address.sin_port);
  acceptor_ = std::thread([this] { accept_all(); });
}

RespServer::~RespServer() {
  go_away();
  for (auto& thread : threads_) thread.join();
}

void RespServer::go_away() {
  if (!acceptor_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    gone_ = true;
    for (const auto& peer : peers_) peer->hang_up();
  }
  shutdown(listener_.get(), SHUT_RDWR);
  acceptor_.join();
  listener_.reset();
}

void RespServer::accept_all() {
  for (;;) {
    const int fd = accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) return;
    const int on = 1;  // replies are small, and one after the other
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    const std::lock_guard lock(mutex_);
    auto peer = std::make_shared<Peer>(fd, connections_.fetch_add(1));
    if (gone_) peer->hang_up();
    peers_.push_back(peer);
    threads_.emplace_back([this, peer] {
      serve(*peer);
      peer->hang_up();
    });
  }
}

void RespServer::serve(Peer& peer) {
  Command command;
  while (peer.read(command)) {
    {
      const std::lock_guard lock(mutex_);
      if (command[0] != "PING") commands_.push_back(command[0]);
    }
    if (hook_ && hook_(peer, command)) {
      peer.is_dirty_ = true;
      continue;
    }
    peer.write(answer_within(peer, command));
  }
}

// As a server does it: MULTI, then what is queued, then EXEC.
std::string RespServer::answer_within(Peer& peer, const Command& command) {
  if (command[0] == "MULTI") {
    peer.queued_.clear();
    peer.in_transaction_ = true;
    peer.is_dirty_ = false;
    return "+OK\r\n";
  }
  if (command[0] == "EXEC") {
    peer.in_transaction_ = false;
    if (peer.is_dirty_) return "-EXECABORT Transaction discarded because of previous errors.\r\n";
    std::string reply = "*" + std::to_string(peer.queued_.size()) + "\r\n";
    for (const Command& one : peer.queued_) reply += answer(one);
    return reply;
  }
  if (!peer.in_transaction_) return answer(command);
  if (command[0] == "PEXPIRE" && command.size() < 3) {
    peer.is_dirty_ = true;
    return "-ERR wrong number of arguments\r\n";
  }
  peer.queued_.push_back(command);
  return "+QUEUED\r\n";
}

std::string RespServer::answer(const Command& command) {
  const std::lock_guard lock(mutex_);
  const std::string& name = command[0];
  if (name == "PING") return "+PONG\r\n";
  if (name == "PTTL") return ":86400000\r\n";
  if (name == "AUTH" || name == "SELECT" || name == "CLIENT") return "+OK\r\n";
  if (name == "HSET") {
    for (std::size_t i = 2; i + 1 < command.size(); i += 2) hashes_[command[1]][command[i]] = command[i + 1];
    return ":" + std::to_string((command.size() - 2) / 2) + "\r\n";
  }
  const auto found = hashes_.find(command[1]);
  if (name == "EXISTS" || name == "TOUCH") {
    const auto there = std::count_if(command.begin() + 1, command.end(),
                                     [&](const auto& key) { return hashes_.contains(key); });
    return ":" + std::to_string(there) + "\r\n";
  }
  if (name == "PEXPIRE") return found != hashes_.end() ? ":1\r\n" : ":0\r\n";
  if (name == "UNLINK") return ":" + std::to_string(hashes_.erase(command[1])) + "\r\n";
  CHECK(name == "HMGET");
  std::string reply = "*" + std::to_string(command.size() - 2) + "\r\n";
  for (std::size_t i = 2; i < command.size(); ++i) {
    const bool there = found != hashes_.end() && found->second.count(command[i]) != 0;
    reply += there ? bulk(found->second[command[i]]) : "$-1\r\n";
  }
  return reply;
}

std::vector<std::string> RespServer::commands() {
  const std::lock_guard lock(mutex_);
  return commands_;
}

std::map<std::string, std::string> RespServer::value(const std::string& key) {
  const std::lock_guard lock(mutex_);
  return hashes_[key];
}

void RespServer::set(const std::string& key, const std::string& field, const std::string& value) {
  const std::lock_guard lock(mutex_);
  hashes_[key][field] = value;
}

bool RespServer::has(const std::string& key) {
  const std::lock_guard lock(mutex_);
  return hashes_.count(key) != 0;
}

}  // namespace kvpool::test
