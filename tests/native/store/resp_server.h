// A small Redis of one process that a test can make misbehave: it keeps hashes, and before each command it
// asks a hook.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "store/descriptor.h"

namespace kvpool::test {

using Command = std::vector<std::string>;

// One connection, served by a thread of its own.
class Peer {
 public:
  Peer(int fd, int number) : fd_(fd), number_(number) {}
  int number() const { return number_; }  // 0 is the first connection: the probe at open
  bool read(Command& command);            // false: the other side has gone
  void write(std::string_view text);
  void hang_up();

 private:
  friend class RespServer;
  bool fill();

  std::vector<Command> queued_;  // of a transaction
  bool in_transaction_ = false;
  bool is_dirty_ = false;  // one of its commands was no good, or a hook has answered it

  Descriptor fd_;
  const int number_;
  std::string buffer_;
};

class RespServer {
 public:
  // True: the hook has answered, or has chosen not to.
  using Hook = std::function<bool(Peer&, const Command&)>;

  explicit RespServer(Hook hook = {});
  ~RespServer();

  std::uint16_t port() const { return port_; }
  int connections() const { return connections_.load(); }
  std::vector<std::string> commands();  // their names, of all connections, PING left out
  std::map<std::string, std::string> value(const std::string& key);
  void set(const std::string& key, const std::string& field, const std::string& value);
  bool has(const std::string& key);
  // Stops listening and cuts every connection.
  void go_away();

 private:
  void accept_all();
  void serve(Peer& peer);
  std::string answer_within(Peer& peer, const Command& command);
  std::string answer(const Command& command);

  const Hook hook_;
  Descriptor listener_;
  std::uint16_t port_ = 0;
  std::atomic<int> connections_{0};
  std::mutex mutex_;  // guards what follows
  std::map<std::string, std::map<std::string, std::string>> hashes_;
  std::vector<std::string> commands_;
  std::vector<std::shared_ptr<Peer>> peers_;
  std::vector<std::thread> threads_;
  bool gone_ = false;
  std::thread acceptor_;
};

std::string bulk(std::string_view text);  // "$3\r\nabc\r\n"

}  // namespace kvpool::test
