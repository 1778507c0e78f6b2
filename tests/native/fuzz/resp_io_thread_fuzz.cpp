// A connection whose server says anything: every request ends in time, and a hit is these bytes and no others.
//   input: one byte, whose low seven bits say into pieces of how many bytes the reply is cut (0: none); then the reply
// What is asked is always the same: EXISTS, UNLINK and two HMGET in this order, or, with the highest bit of that byte,
// a put.
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "store/resp.h"

using namespace kvpool;
using namespace std::chrono_literals;

namespace {

Key make_key(char digit) {
  return parse_key("kvpool:t:" + std::string(32, 'a') + ":" + std::string(16, digit) + ":0:0");
}

// Of key '2' and key '3'; the corpus holds good replies for them.
std::vector<std::byte> payload(std::size_t nbytes, unsigned seed) {
  std::vector<std::byte> bytes(nbytes);
  for (std::size_t i = 0; i < nbytes; ++i) bytes[i] = static_cast<std::byte>(i * seed);
  return bytes;
}

// Answers PING on each connection, then whatever it was told to say; one thread, one connection at a time.
class Server {
 public:
  Server() : path_("/tmp/kvpool-fuzz." + std::to_string(getpid())) {
    unlink(path_.c_str());
    listener_ = Descriptor(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path_.copy(address.sun_path, sizeof address.sun_path - 1);
    CHECK(bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    CHECK(listen(listener_.get(), 64) == 0);
    std::thread([this] { serve(); }).detach();  // as long as the process
  }
  const std::string& path() const { return path_; }
  // `last_words`: how what is asked ends.
  void say(std::string_view reply, std::size_t piece_nbytes, std::string last_words) {
    const std::lock_guard lock(mutex_);
    last_words_ = std::move(last_words);
    reply_ = reply;
    said_ = false;
    piece_nbytes_ = piece_nbytes == 0 ? reply.size() : piece_nbytes;
  }

 private:
  void serve() {
    for (;;) {
      const Descriptor peer(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!hears(peer, "PING\r\n") || send(peer.get(), "+PONG\r\n", 7, MSG_NOSIGNAL) != 7) continue;
      // All is asked before anything is said. What is asked again, a deletion, is not answered.
      if (!hears(peer, awaited())) continue;
      std::string reply;
      std::size_t piece_nbytes = 0;
      {
        const std::lock_guard lock(mutex_);
        if (!std::exchange(said_, true)) reply = reply_;
        piece_nbytes = piece_nbytes_;
      }
      for (std::size_t at = 0; at < reply.size(); at += piece_nbytes) {
        const std::size_t n = std::min(piece_nbytes, reply.size() - at);
        if (send(peer.get(), reply.data() + at, n, MSG_NOSIGNAL) < 0) break;
      }
    }
  }

  std::string awaited() {
    const std::lock_guard lock(mutex_);
    return said_ ? "\r\n" : last_words_;
  }

  // Until this came; false when the other side has gone.
  static bool hears(const Descriptor& peer, std::string_view word) {
    char piece[4096];
    for (std::string heard; heard.find(word) == std::string::npos;) {
      const ssize_t n = recv(peer.get(), piece, sizeof piece, 0);
      if (n <= 0) return false;
      heard.append(piece, static_cast<std::size_t>(n));
    }
    return true;
  }

  std::string path_;
  Descriptor listener_;
  std::mutex mutex_;  // guards what follows
  std::string reply_;
  std::string last_words_;
  bool said_ = false;
  std::size_t piece_nbytes_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  static Server& server = *new Server;
  if (nbytes == 0) return 0;
  const bool puts = (data[0] & 0x80) != 0;
  server.say({reinterpret_cast<const char*>(data) + 1, nbytes - 1}, data[0] & 0x7f,
             puts ? "EXEC\r\n" : make_key('3').text + "\r\n$1\r\nh\r\n");
  RespSettings settings;
  settings.endpoint = {"", 0, server.path()};
  IoExecutor engine(std::make_unique<RespBackend>(std::move(settings)), 1);

  const auto large = payload(17'000, 7);  // in two fields
  const auto small = payload(20, 3);
  // Each its own allocation, so that a byte beyond it is seen; freed as soon as its batch is done.
  auto into = std::make_unique<std::vector<std::vector<std::byte>>>();
  into->emplace_back(large.size());
  into->emplace_back(small.size());
  auto from = std::make_unique<std::vector<std::byte>>(small);
  std::vector<std::shared_ptr<Batch>> batches;
  if (puts) {
    batches.push_back(engine.submit(Op::kPut, {make_key('4')}, {*from}, 1s));
  } else {
    batches.push_back(engine.submit(Op::kContains, {make_key('0')}, {}, 1s));
    batches.push_back(engine.submit(Op::kDelete, {make_key('1')}, {}, 1s));
    batches.push_back(engine.submit(Op::kGet, {make_key('2'), make_key('3')}, {(*into)[0], (*into)[1]}, 1s));
  }
  for (const auto& batch : batches) {
    CHECK(batch->wait_until(Clock::now() + 30s));
    for (const Status status : batch->results()) CHECK(static_cast<std::size_t>(status) < kStatusCount);
  }
  if (!puts) {
    CHECK(batches[2]->results()[0] != Status::kOk || (*into)[0] == large);
    CHECK(batches[2]->results()[1] != Status::kOk || (*into)[1] == small);
  }
  into.reset();
  from.reset();
  CHECK(engine.close(30s));  // on a starved machine, too
  return 0;
}
