// The RESP backend against servers that misbehave: whatever they send, never a wrong byte, never a hang.
// Over 400 lines because every fault of a connection is tried on the same scripted server.
#include "store/resp.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "store/executors.h"
#include "store/resp_server.h"

namespace kvpool {
namespace {

using namespace std::chrono_literals;
using test::bulk;
using test::Bytes;
using test::Command;
using test::counter;
using test::eventually;
using test::make_key;
using test::make_keys;
using test::make_payload;
using test::Peer;
using test::RespServer;

using Fields = std::vector<std::pair<std::string, std::string>>;

// What a good record consists of, in the order of its bytes.
Fields fields(const Key& key, const Bytes& payload) {
  const RecordHeader header = pack_header(key, payload);
  const auto* data = reinterpret_cast<const char*>(payload.data());
  const RecordFields cut = cut_record(payload.size());
  Fields found;
  for (std::size_t i = 0, begin = 0; i < cut.count; begin += cut.nbytes[i++]) {
    found.emplace_back(cut.name(i), std::string(data + begin, cut.nbytes[i]));
  }
  found.back().second.append(reinterpret_cast<const char*>(&header), sizeof header);
  return found;
}

std::string reply_of(const Fields& fields) {
  std::string reply = "*" + std::to_string(fields.size()) + "\r\n";
  for (const auto& [name, value] : fields) reply += bulk(value);
  return reply;
}

std::string good_reply(const Key& key, const Bytes& payload) { return reply_of(fields(key, payload)); }

void keep(RespServer& server, const Key& key, const Bytes& payload) {
  for (const auto& [name, value] : fields(key, payload)) server.set(key.text, name, value);
}

std::unique_ptr<IoExecutor> connect(const RespServer& server, unsigned io_threads = 1) {
  RespSettings settings;
  settings.endpoint = {"127.0.0.1", server.port(), ""};
  return std::make_unique<IoExecutor>(std::make_unique<RespBackend>(std::move(settings)), io_threads);
}

std::shared_ptr<Batch> submit(IoExecutor& engine, Op op, const std::vector<Key>& keys,
                              std::vector<Bytes>* buffers, Clock::duration timeout = 10s) {
  std::vector<Batch::Buffer> views;
  if (buffers != nullptr) views.assign(buffers->begin(), buffers->end());
  return engine.submit(op, keys, std::move(views), timeout);
}

std::vector<Status> run(IoExecutor& engine, Op op, const std::vector<Key>& keys, std::vector<Bytes>* buffers,
                        Clock::duration timeout = 10s) {
  const auto batch = submit(engine, op, keys, buffers, timeout);
  CHECK(batch->wait_until(Clock::now() + timeout + 5s));
  return {batch->results().begin(), batch->results().end()};
}

Status run_one(IoExecutor& engine, Op op, const Key& key, Bytes* buffer, Clock::duration timeout = 10s) {
  std::vector<Bytes> buffers;
  if (buffer != nullptr) buffers.push_back(*buffer);
  const Status status = run(engine, op, {key}, buffer != nullptr ? &buffers : nullptr, timeout)[0];
  if (buffer != nullptr) *buffer = buffers[0];
  return status;
}

// Until the I/O thread has dialled again.
bool gets(IoExecutor& engine, const Key& key, const Bytes& expected) {
  return eventually([&] {
    Bytes target(expected.size());
    return run_one(engine, Op::kGet, key, &target) == Status::kOk && target == expected;
  });
}

// A hook that lets commands wait until it is opened.
struct Gate {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_open = false;
  int waiting = 0;

  void open() {
    const std::lock_guard lock(mutex);
    is_open = true;
    changed.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex);
    ++waiting;
    changed.notify_all();
    changed.wait(lock, [this] { return is_open; });
  }
  bool somebody_waits() {
    const std::lock_guard lock(mutex);
    return waiting != 0;
  }
};

}  // namespace

TEST(resp_round_trips_of_every_shape) {
  RespServer server;
  const auto engine = connect(server, 2);
  for (const std::size_t nbytes :
       {0UL, 1UL, 127UL, 128UL, 129UL, 4000UL, 4096UL + 128, 262144UL, 262145UL, 3000000UL}) {
    std::vector<Bytes> values = {make_payload(nbytes, 1), make_payload(nbytes, 2), make_payload(nbytes, 3)};
    std::vector<Bytes> targets(3, Bytes(nbytes));
    const auto keys = make_keys(3);
    CHECK(run(*engine, Op::kPut, keys, &values) == std::vector<Status>(3, Status::kOk));
    CHECK(run(*engine, Op::kGet, keys, &targets) == std::vector<Status>(3, Status::kOk));
    CHECK(targets == values);
    const auto kept = server.value(keys[1].text);
    const Fields wanted = fields(keys[1], values[1]);
    CHECK(kept.size() == wanted.size());
    for (const auto& [name, value] : wanted) CHECK(kept.at(name) == value);
  }
  CHECK(run(*engine, Op::kContains, make_keys(4), nullptr) ==
        (std::vector<Status>{Status::kOk, Status::kOk, Status::kOk, Status::kMiss}));
  CHECK(run(*engine, Op::kDelete, make_keys(4), nullptr) ==
        (std::vector<Status>{Status::kOk, Status::kOk, Status::kOk, Status::kMiss}));
  CHECK(counter(*engine, "disconnections") == 0);
}

TEST(resp_many_in_flight_keep_their_order) {
  RespServer server;
  const auto engine = connect(server);
  std::vector<Bytes> values, targets;
  for (unsigned i = 0; i < 600; ++i) {
    values.push_back(make_payload(1 + i * 13, i));
    targets.emplace_back(values.back().size());
  }
  const auto keys = make_keys(600);
  CHECK(run(*engine, Op::kPut, keys, &values) == std::vector<Status>(600, Status::kOk));
  CHECK(run(*engine, Op::kGet, keys, &targets) == std::vector<Status>(600, Status::kOk));
  CHECK(targets == values);
}

// Keys of one question share commands of up to 64; only where some are there and some are not is each asked for.
TEST(resp_presence_of_many_keys_is_asked_for_in_few_commands) {
  constexpr unsigned kKeys = 200;
  for (const Op op : {Op::kContains, Op::kTouch}) {
    for (const unsigned present : {0U, 63U, 64U, 65U, 130U, kKeys}) {
      RespServer server;
      for (unsigned i = 0; i < present; ++i) server.set(make_key(i).text, "h", "x");
      const auto engine = connect(server);
      CHECK(run(*engine, Op::kContains, {make_key(kKeys)}, nullptr)[0] == Status::kMiss);  // it is connected
      const std::size_t before = server.commands().size();
      const std::vector<Status> found = run(*engine, op, make_keys(kKeys), nullptr);
      for (unsigned i = 0; i < kKeys; ++i) CHECK((found[i] == Status::kOk) == (i < present));
      const auto commands = server.commands();
      const auto asked = std::count_if(commands.begin() + static_cast<std::ptrdiff_t>(before), commands.end(),
                                       [](const auto& name) { return name == "EXISTS" || name == "TOUCH"; });
      CHECK(asked <= 2 * kKeys / 32 + 64);
    }
  }
}

// A cluster behind a plain URL, and a user who may see some keys only.
TEST(resp_keys_that_may_not_share_a_command_are_asked_for_one_by_one) {
  for (const std::string error : {"-CROSSSLOT Keys in request don't hash to the same slot\r\n",
                                  "-NOPERM No permissions to access a key\r\n",
                                  "-NOPERM User w has no permissions to run the 'touch' command\r\n"}) {
    std::atomic<unsigned> refused = 0;
    RespServer server([&](Peer& peer, const Command& command) {
      const bool is_of_command = error.find("command") != std::string::npos && command[0] == "TOUCH";
      if (!is_of_command && (command.size() <= 2 || (command[0] != "TOUCH" && command[0] != "EXISTS")))
        return false;
      ++refused;
      peer.write(error);
      return true;
    });
    server.set(make_key(3).text, "h", "x");
    const auto engine = connect(server);
    for (int turn = 0; turn < 2; ++turn) {
      const std::vector<Status> found = run(*engine, Op::kTouch, make_keys(100), nullptr);
      for (unsigned i = 0; i < 100; ++i) CHECK(found[i] == (i == 3 ? Status::kOk : Status::kMiss));
    }
    CHECK(refused <= 4);
    CHECK(counter(*engine, "disconnections") == 0);
  }
}

// A busy or loading server refuses everything, not that keys share a command.
TEST(resp_keys_share_a_command_again_after_a_fault_that_passes) {
  std::atomic<bool> busy = true;
  std::atomic<unsigned> asked = 0;
  RespServer server([&](Peer& peer, const Command& command) {
    if (command[0] != "EXISTS") return false;
    ++asked;
    if (!busy) return false;
    peer.write("-BUSY Valkey is busy running a script\r\n");
    return true;
  });
  const auto engine = connect(server);
  for (const Status status : run(*engine, Op::kContains, make_keys(40), nullptr))
    CHECK(status == Status::kFault);
  busy = false;
  asked = 0;
  for (const Status status : run(*engine, Op::kContains, make_keys(40), nullptr))
    CHECK(status == Status::kMiss);
  CHECK(asked == 1 || asked == 2);  // the I/O thread may send what it has taken before the rest
  CHECK(counter(*engine, "disconnections") == 0);
}

TEST(resp_more_keys_than_were_asked_for_are_no_answer) {
  RespServer server([&](Peer& peer, const Command& command) {
    if (command[0] != "EXISTS") return false;
    peer.write(":" + std::to_string(command.size()) + "\r\n");
    return true;
  });
  const auto engine = connect(server);
  for (const Status status : run(*engine, Op::kContains, make_keys(40), nullptr))
    CHECK(status == Status::kFault);
}

// A caller that gives up, and a connection that ends, end all that share the command.
TEST(resp_keys_of_one_command_end_together) {
  Gate gate;
  std::atomic<bool> good = false;
  RespServer server([&](Peer& peer, const Command& command) {
    if (command[0] != "EXISTS" || good) return false;
    gate.pass();
    peer.hang_up();
    return true;
  });
  const auto engine = connect(server);
  const auto late = submit(*engine, Op::kContains, make_keys(50), nullptr, 300ms);
  CHECK(late->wait_until(Clock::now() + 10s));
  for (const Status status : late->results()) CHECK(status == Status::kTimedOut);
  const auto cancelled = submit(*engine, Op::kContains, make_keys(50), nullptr, 60s);
  cancelled->cancel();
  CHECK(cancelled->wait_until(Clock::now() + 10s));
  good = true;
  gate.open();
  CHECK(eventually([&] {
    const auto found = run(*engine, Op::kContains, make_keys(50), nullptr);
    return std::count(found.begin(), found.end(), Status::kMiss) == 50;
  }));
  CHECK(counter(*engine, "queued") == 0);
}

TEST(resp_a_reply_may_come_byte_by_byte) {
  const Bytes value = make_payload(700);
  RespServer server([&](Peer& peer, const Command& command) {
    if (command[0] != "HMGET") return false;
    for (const char c : good_reply(make_key(0), value)) peer.write({&c, 1});
    return true;
  });
  const auto engine = connect(server);
  Bytes target(700);
  CHECK(run_one(*engine, Op::kGet, make_key(0), &target) == Status::kOk);
  CHECK(target == value);
}

TEST(resp_a_damaged_record_is_a_miss_and_goes) {
  const Key key = make_key(0);
  const Bytes value = make_payload(296'000);
  const Fields good = fields(key, value);
  CHECK(good.size() == 3);
  const std::string &b = good[0].second, &c = good[1].second, &h = good[2].second;
  const std::size_t tail = h.size() - kRecordHeaderNbytes;
  const auto flipped = [](std::string text, std::size_t at) {
    text[at] = static_cast<char>(text[at] ^ 1);
    return text;
  };
  struct Case {
    std::optional<std::string> b, c, h;
    const char* cause;
  };
  const Fields other = fields(make_key(5), value);
  const std::vector<Case> cases = {
      {b, c, flipped(h, tail + 0), "magic"},
      {b, c, flipped(h, tail + 4), "version"},
      {b, c, flipped(h, tail + 6), "flags"},
      {b, c, flipped(h, tail + 8), "length"},
      {b, c, flipped(h, tail + 16), "fingerprint"},
      {b, c, flipped(h, tail + 32), "hash"},
      {b, c, flipped(h, tail + 52), "group"},
      {b, c, flipped(h, tail + 54), "rank"},
      {b, c, flipped(h, tail + 56), "checksum"},
      {b, c, flipped(h, tail + 72), "checksum"},
      {b, c, flipped(h, 0), "checksum"},
      {b, c, flipped(h, tail - 1), "checksum"},
      {flipped(b, 0), c, h, "checksum"},
      {flipped(b, b.size() - 1), c, h, "checksum"},
      {b, flipped(c, 0), h, "checksum"},
      {b, c, h.substr(0, kRecordHeaderNbytes - 1), "truncated"},
      {b, c, "", "truncated"},
      {b, c, h.substr(0, kRecordHeaderNbytes), "length"},
      {b, c, h + "x", "length"},
      {b, c, h + std::string(99999, 'x'), "length"},
      {b.substr(1), c, h, "length"},
      {b + "x", c, h, "length"},
      {"", c, h, "length"},
      {b + std::string(1 << 20, 'x'), c, h, "length"},
      {b, c.substr(1), h, "length"},
      {other[0].second, other[1].second, other[2].second, "hash"},
      {b, c, std::nullopt, "truncated"},
      {b, std::nullopt, h, "truncated"},
      {std::nullopt, c, h, "truncated"},
      {b, c, std::string(h.size(), 'x'), "magic"},
  };
  for (const Case& one : cases) {
    RespServer server;
    if (one.b) server.set(key.text, "b", *one.b);
    if (one.c) server.set(key.text, "c", *one.c);
    if (one.h) server.set(key.text, "h", *one.h);
    std::vector<Bytes> values = {value};
    const auto engine = connect(server);
    CHECK(run_one(*engine, Op::kPut, make_key(1), &values[0]) == Status::kOk);
    // The one behind it on the same connection must not suffer.
    std::vector<Bytes> targets(2, Bytes(value.size()));
    CHECK(run(*engine, Op::kGet, {key, make_key(1)}, &targets) ==
          (std::vector<Status>{Status::kMiss, Status::kOk}));
    CHECK(targets[1] == value);
    CHECK(!server.has(key.text));
    CHECK(counter(*engine, "damaged") == 1);
    CHECK(counter(*engine, std::string("damaged_") + one.cause) == 1);
    CHECK(counter(*engine, "disconnections") == 0);
  }
}

TEST(resp_a_record_too_large_to_drain_costs_the_connection_and_goes) {
  const Key key = make_key(0);
  const Bytes value = make_payload(17'000);
  RespServer server([&](Peer& peer, const Command& command) {
    if (command[0] != "HMGET" || command[1] != key.text) return false;
    peer.write("*2\r\n$100000000\r\nxxxxx");
    return true;
  });
  keep(server, key, value);
  const auto engine = connect(server);
  Bytes target(value.size());
  CHECK(run_one(*engine, Op::kGet, key, &target) == Status::kMiss);
  CHECK(eventually([&] { return !server.has(key.text); }));
  CHECK(counter(*engine, "damaged_length") == 1);
}

// Cut off after every single byte of its reply, a server is a fault, and the next one is right.
TEST(resp_a_reply_cut_at_any_byte_is_a_fault) {
  const Key key = make_key(0);
  const Bytes value = make_payload(200);
  const std::string reply = good_reply(key, value);
  std::atomic<std::size_t> cut = 0;
  std::atomic<bool> armed = false;
  RespServer server([&](Peer& peer, const Command& command) {
    if (command[0] != "HMGET" || !armed.exchange(false)) return false;
    peer.write(std::string_view(reply).substr(0, cut));
    peer.hang_up();
    return true;
  });
  keep(server, key, value);
  const auto engine = connect(server);
  for (; cut < reply.size(); cut = cut + 1) {
    CHECK(gets(*engine, key, value));
    armed = true;
    Bytes target(200);
    CHECK(run_one(*engine, Op::kGet, key, &target) == Status::kFault);
  }
  CHECK(gets(*engine, key, value));
  CHECK(server.has(key.text));
  CHECK(counter(*engine, "damaged") == 0);
}

TEST(resp_what_cannot_be_understood_is_a_fault_and_another_connection) {
  const Key key = make_key(0);
  const Bytes value = make_payload(17'000);
  for (const std::string reply :
       {"+OK\r\n", ":1\r\n", "$3\r\nabc\r\n", "*3\r\n", "*1\r\n", "*-1\r\n", "*2\r\n:1\r\n:2\r\n",
        "*2\r\n*2\r\n", "$-1\r\n", "garbage\r\n", "\r\n", "*2\r\n$-2\r\n", "*2\r\n$9999999999\r\n",
        "*2\r\n-ERR x\r\n", "*2\r\n$1\r\nabc", "HTTP/1.1 400 Bad Request\r\n\r\n"}) {
    std::atomic<bool> armed = true;
    RespServer server([&](Peer& peer, const Command& command) {
      if (command[0] != "HMGET" || !armed.exchange(false)) return false;
      peer.write(reply);
      return true;
    });
    keep(server, key, value);
    const auto engine = connect(server);
    Bytes target(17'000);
    CHECK(run_one(*engine, Op::kGet, key, &target) == Status::kFault);
    CHECK(gets(*engine, key, value));
    CHECK(counter(*engine, "disconnections") == 1);
    CHECK(counter(*engine, "damaged") == 0);
  }
}

TEST(resp_a_surplus_reply_is_never_taken_for_the_next_one) {
  const Bytes first = make_payload(500, 1);
  const Bytes second = make_payload(500, 2);
  std::atomic<bool> armed = true;
  RespServer server([&](Peer& peer, const Command& command) {
    if (command[0] != "HMGET" || !armed.exchange(false)) return false;
    const std::string once = good_reply(make_key(0), first);
    peer.write(once + once);
    return true;
  });
  for (unsigned i = 0; i < 2; ++i) keep(server, make_key(i), i == 0 ? first : second);
  const auto engine = connect(server);
  Bytes target(500);
  // The reply itself was right and proved itself.
  CHECK(run_one(*engine, Op::kGet, make_key(0), &target) == Status::kOk);
  CHECK(eventually([&] { return counter(*engine, "disconnections") == 1; }));
  CHECK(gets(*engine, make_key(1), second));

  // With the next request already on its way the surplus does not prove itself for that one.
  armed = true;
  std::vector<Bytes> targets(2, Bytes(500));
  const auto results = run(*engine, Op::kGet, {make_key(0), make_key(1)}, &targets);
  CHECK(results[1] != Status::kOk || targets[1] == second);
}

TEST(resp_error_replies) {
  struct Case {
    const char* command;
    const char* reply;
    Op op;
    Status status;
    std::uint64_t disconnections;
  };
  for (const Case& one : {
           Case{"HSET", "-OOM command not allowed when used memory > 'maxmemory'.\r\n", Op::kPut,
                Status::kNoRoom, 0},
           Case{"EXEC", "-EXECABORT Transaction discarded because of: OOM command not allowed\r\n", Op::kPut,
                Status::kNoRoom, 0},
           Case{"EXEC", "-EXECABORT Transaction discarded because of previous errors.\r\n", Op::kPut,
                Status::kRefused, 0},
           Case{"HSET", "-NOPERM No permissions to access a key\r\n", Op::kPut, Status::kRefused, 0},
           Case{"PEXPIRE", "-NOPERM no\r\n", Op::kPut, Status::kRefused, 0},
           Case{"MULTI", "-NOPERM no\r\n", Op::kPut, Status::kRefused, 0},
           Case{"EXEC", "*2\r\n:1\r\n:0\r\n", Op::kPut, Status::kNoRoom, 0},
           Case{"EXEC", "*2\r\n-ERR x\r\n:1\r\n", Op::kPut, Status::kRefused, 0},
           Case{"EXEC", "-NOPERM no\r\n", Op::kPut, Status::kRefused, 0},
           Case{"EXEC", "*1\r\n:2\r\n", Op::kPut, Status::kFault, 1},
           Case{"EXEC", "*-1\r\n", Op::kPut, Status::kFault, 1},
           Case{"EXEC", "*2\r\n:1\r\n:2\r\n", Op::kPut, Status::kFault, 1},
           Case{"EXEC", "*2\r\n:2\r\n:1\r\n", Op::kPut, Status::kFault, 1},
           Case{"HSET", "-WRONGTYPE x\r\n", Op::kPut, Status::kRefused, 0},
           Case{"HSET", "-MOVED 1 127.0.0.1:1\r\n", Op::kPut, Status::kFault, 0},
           Case{"HSET", "-ERR unknown command 'HSET'\r\n", Op::kPut, Status::kRefused, 0},
           Case{"HSET", "-\r\n", Op::kPut, Status::kRefused, 0},
           Case{"HSET", "+OK\r\n", Op::kPut, Status::kFault, 1},
           Case{"HSET", ":3\r\n", Op::kPut, Status::kFault, 1},
           Case{"HMGET", "-LOADING Redis is loading the dataset in memory\r\n", Op::kGet, Status::kFault, 0},
           Case{"HMGET", "-NOAUTH Authentication required.\r\n", Op::kGet, Status::kFault, 0},
           Case{"HMGET", "-WRONGTYPE x\r\n", Op::kGet, Status::kMiss, 0},
           Case{"HMGET", "-WRONGPASS x\r\n", Op::kGet, Status::kFault, 0},
           Case{"HMGET", "*1\r\n-ERR x\r\n", Op::kGet, Status::kFault, 1},
           Case{"TOUCH", "-NOPERM User w has no permissions to run the 'touch' command\r\n", Op::kTouch,
                Status::kMiss, 0},
           Case{"TOUCH", "-NOPERM No permissions to access a key\r\n", Op::kTouch, Status::kRefused, 0},
           Case{"TOUCH", "-NOPERM User w has no permissions to run the 'touch' command\r\n", Op::kPutAbsent,
                Status::kOk, 0},
           Case{"TOUCH", "-NOPERM No permissions to access a key\r\n", Op::kPutAbsent, Status::kRefused, 0},
           Case{"TOUCH", "-MOVED 1 127.0.0.1:1\r\n", Op::kPutAbsent, Status::kFault, 0},
           Case{"TOUCH", ":2\r\n", Op::kPutAbsent, Status::kFault, 1},
           Case{"TOUCH", ":1\r\n", Op::kPutAbsent, Status::kPresent, 0},
           Case{"HSET", "-OOM command not allowed\r\n", Op::kPutAbsent, Status::kNoRoom, 0},
           Case{"HSET", "-READONLY You can't write against a read only replica.\r\n", Op::kPutAbsent,
                Status::kFault, 0},
           Case{"EXEC", "*1\r\n:2\r\n", Op::kPutAbsent, Status::kFault, 1},
           Case{"EXISTS", "-NOPERM x\r\n", Op::kContains, Status::kRefused, 0},
           Case{"EXISTS", ":2\r\n", Op::kContains, Status::kFault, 1},
           Case{"UNLINK", "$-1\r\n", Op::kDelete, Status::kFault, 1},
       }) {
    RespServer server([&](Peer& peer, const Command& command) {
      if (command[0] != one.command) return false;
      peer.write(one.reply);
      return true;
    });
    const auto engine = connect(server);
    std::vector<Bytes> buffers = {make_payload(1000)};
    const auto batch = submit(*engine, one.op, {make_key(0)}, moves_bytes(one.op) ? &buffers : nullptr);
    CHECK(batch->wait_until(Clock::now() + 10s));
    CHECK(batch->results()[0] == one.status);
    if ((one.status == Status::kFault || one.status == Status::kRefused) && one.reply[0] == '-') {
      const std::string words(one.reply + 1, std::string_view(one.reply).find('\r') - 1);
      CHECK(batch->error()->find(words) != std::string::npos);
    }
    CHECK(eventually([&] { return counter(*engine, "disconnections") == one.disconnections; }));
  }
}

TEST(resp_a_silent_server_costs_the_deadline_and_no_more) {
  Gate gate;
  std::atomic<bool> armed = true;
  RespServer server([&](Peer&, const Command& command) {
    if (command[0] == "PING" || !armed) return false;
    gate.pass();
    return true;
  });
  const Bytes value = make_payload(1000);
  const auto engine = connect(server);
  const auto begin = Clock::now();
  Bytes target(1000);
  CHECK(run_one(*engine, Op::kGet, make_key(0), &target, 100ms) == Status::kTimedOut);
  CHECK(Clock::now() - begin < 1s);
  CHECK(eventually([&] { return counter(*engine, "disconnections") == 1; }));
  // The silent connection stays silent: another one has to take its place.
  armed = false;
  Bytes source = value;
  CHECK(eventually([&] { return run_one(*engine, Op::kPut, make_key(0), &source) == Status::kOk; }));
  CHECK(gets(*engine, make_key(0), value));
  gate.open();
}

TEST(resp_the_silence_of_one_connection_makes_the_others_suspect) {
  Gate gate;
  std::atomic<bool> silent = false;
  RespServer server([&](Peer&, const Command&) {
    if (!silent) return false;
    gate.pass();
    return true;
  });
  const auto engine = connect(server, 4);
  CHECK(eventually([&] { return counter(*engine, "up_connections") == 4; }));
  silent = true;
  CHECK(run_one(*engine, Op::kContains, make_key(0), nullptr, 100ms) == Status::kTimedOut);
  CHECK(eventually([&] { return counter(*engine, "disconnections") == 1; }));
  for (int round = 0; round < 20; ++round) {
    const auto begin = Clock::now();
    CHECK(run_one(*engine, Op::kContains, make_key(0), nullptr, 60s) == Status::kFault);
    CHECK(Clock::now() - begin < 5s);
  }
  CHECK(counter(*engine, "refused") == 20);
  CHECK(counter(*engine, "up_connections") == 0);
  silent = false;
  gate.open();
  CHECK(eventually([&] { return run_one(*engine, Op::kContains, make_key(0), nullptr) == Status::kMiss; }));
  CHECK(eventually([&] { return counter(*engine, "up_connections") == 4; }));
}

// One that waits for a reply takes nothing more until it comes, and loses nothing.
TEST(resp_a_suspect_connection_that_answers_goes_on) {
  Gate gate;
  Gate other;
  const Bytes value = make_payload(600'000);
  RespServer server([&](Peer& peer, const Command& command) {
    if (command[0] == "EXISTS" && command[1] == make_key(9).text) {
      other.pass();
      return true;
    }
    if (command[0] != "HMGET") return false;
    const std::string reply = good_reply(make_key(0), value);
    peer.write(std::string_view(reply).substr(0, 1000));
    gate.pass();
    peer.write(std::string_view(reply).substr(1000));
    return true;
  });
  const auto engine = connect(server, 2);
  CHECK(eventually([&] { return counter(*engine, "up_connections") == 2; }));
  std::vector<Bytes> target(1, Bytes(value.size()));
  const auto get = submit(*engine, Op::kGet, {make_key(0)}, &target, 60s);
  CHECK(eventually([&] { return gate.somebody_waits(); }));
  // Whichever I/O thread takes it: the same one waits behind the get, and ends it with its silence.
  CHECK(run_one(*engine, Op::kContains, make_key(9), nullptr, 100ms) == Status::kTimedOut);
  gate.open();
  CHECK(get->wait_until(Clock::now() + 10s));
  CHECK(get->results()[0] == Status::kFault || target[0] == value);
  CHECK(eventually([&] { return run_one(*engine, Op::kContains, make_key(1), nullptr) == Status::kMiss; }));
  CHECK(eventually([&] { return counter(*engine, "up_connections") == 2; }));
  other.open();
}

TEST(resp_a_server_that_is_gone_is_a_fault_at_once) {
  auto server = std::make_unique<RespServer>();
  const auto engine = connect(*server, 2);
  CHECK(run_one(*engine, Op::kContains, make_key(0), nullptr) == Status::kMiss);
  server.reset();
  CHECK(eventually(
      [&] { return counter(*engine, "failed_dials") >= 2 && counter(*engine, "up_connections") == 0; }));
  // Each batch ends at once; the words become those of the last attempt to connect.
  CHECK(eventually([&] {
    const auto begin = Clock::now();
    const auto batch = submit(*engine, Op::kContains, make_keys(100), nullptr, 60s);
    CHECK(batch->wait_until(Clock::now() + 10s));
    CHECK(Clock::now() - begin < 2s);
    for (const Status status : batch->results()) CHECK(status == Status::kFault);
    return batch->error()->find("refused") != std::string::npos;
  }));
}

TEST(resp_a_cancelled_get_lets_its_buffer_go_and_harms_no_other) {
  Gate gate;
  const Bytes value = make_payload(600'000);
  RespServer server([&](Peer& peer, const Command& command) {
    if (command[0] != "HMGET") return false;
    if (command[1] != make_key(0).text) return false;
    const std::string reply = good_reply(make_key(0), value);
    peer.write(std::string_view(reply).substr(0, 300'000));
    gate.pass();
    peer.write(std::string_view(reply).substr(300'000));
    return true;
  });
  keep(server, make_key(1), value);
  const auto engine = connect(server);
  std::vector<Bytes> cancelled(1, Bytes(value.size()));
  std::vector<Bytes> other(1, Bytes(value.size()));
  const auto first = submit(*engine, Op::kGet, {make_key(0)}, &cancelled, 60s);
  const auto second = submit(*engine, Op::kGet, {make_key(1)}, &other, 60s);
  CHECK(eventually([&] { return gate.somebody_waits(); }));
  first->cancel();
  CHECK(first->wait_until(Clock::now() + 10s));
  CHECK(first->results()[0] == Status::kCancelled);
  // From here on it is the caller's: the sanitizers see a write into it.
  cancelled.clear();
  cancelled.shrink_to_fit();
  gate.open();
  CHECK(second->wait_until(Clock::now() + 10s));
  CHECK(second->results()[0] == Status::kOk);
  CHECK(other[0] == value);
  CHECK(counter(*engine, "disconnections") == 0);
}

TEST(resp_a_copy_says_who_wrote_its_record) {
  RespServer server;
  const auto engine = connect(server);
  for (const std::size_t nbytes : {0UL, 1UL, 17'000UL, 262'132UL, 296'000UL}) {
    std::vector<Bytes> values = {make_payload(nbytes)};
    std::vector<Bytes> targets(1, Bytes(nbytes));
    RecordHeader header = make_header(make_key(0), nbytes, {1, 2, 3});
    RecordChecksum checksum;
    checksum.update(values[0]);
    header.checksum = checksum.digest(header);
    const auto put = engine->submit(Op::kPut, {make_key(0)}, {values[0]}, 10s, std::nullopt, {},
                                    {Found{nbytes, Seal{header.writer, header.checksum}}});
    CHECK(put->wait_until(Clock::now() + 15s) && put->results()[0] == Status::kOk);
    const auto got = submit(*engine, Op::kGet, {make_key(0)}, &targets);
    CHECK(got->wait_until(Clock::now() + 15s) && got->results()[0] == Status::kOk);
    CHECK(targets == values);
    CHECK(got->found(0).seal->writer == header.writer && got->found(0).seal->checksum == header.checksum);
  }
}

// Wherever a reply of three fields pauses, and whether its caller waits or leaves meanwhile.
TEST(resp_a_get_pauses_or_ends_at_any_boundary_of_its_fields) {
  const Bytes value = make_payload(296'000);
  const Fields record = fields(make_key(0), value);
  CHECK(record.size() == 3);
  const std::string reply = reply_of(record);
  std::vector<std::size_t> cuts = {1, 3, 4};
  std::size_t end = 4;
  for (const auto& [name, field] : record) {
    const std::size_t begin = end + bulk(field).size() - field.size() - 2;
    end += bulk(field).size();
    const std::size_t last = begin + field.size();
    for (const std::size_t at :
         {begin - 1, begin, begin + 1, begin + field.size() / 2, last - kRecordHeaderNbytes,
          last - kRecordHeaderNbytes + 1, last - 1, last, last + 1, end}) {
      if (at < reply.size()) cuts.push_back(at);
    }
  }
  std::atomic<std::size_t> cut = 0;
  std::shared_ptr<Gate> gate;
  RespServer server([&](Peer& peer, const Command& command) {
    if (command[0] != "HMGET" || command[1] != make_key(0).text) return false;
    peer.write(std::string_view(reply).substr(0, cut));
    gate->pass();
    peer.write(std::string_view(reply).substr(cut));
    return true;
  });
  keep(server, make_key(1), value);
  const auto engine = connect(server);
  for (const bool leaves : {false, true}) {
    for (const std::size_t at : cuts) {
      cut = at;
      gate = std::make_shared<Gate>();
      std::vector<Bytes> first_target(1, Bytes(value.size()));
      std::vector<Bytes> second_target(1, Bytes(value.size()));
      const auto first = submit(*engine, Op::kGet, {make_key(0)}, &first_target, 60s);
      const auto second = submit(*engine, Op::kGet, {make_key(1)}, &second_target, 60s);
      const auto third = submit(*engine, Op::kContains, make_keys(70), nullptr, 60s);
      CHECK(eventually([&] { return gate->somebody_waits(); }));
      std::this_thread::sleep_for(1ms);
      if (leaves) {
        first->cancel();
        CHECK(first->wait_until(Clock::now() + 10s));
        CHECK(first->results()[0] == Status::kCancelled);
        first_target.clear();
        first_target.shrink_to_fit();
      }
      gate->open();
      CHECK(first->wait_until(Clock::now() + 10s));
      CHECK(leaves || (first->results()[0] == Status::kOk && first_target[0] == value));
      CHECK(second->wait_until(Clock::now() + 10s));
      CHECK(second->results()[0] == Status::kOk && second_target[0] == value);
      CHECK(third->wait_until(Clock::now() + 10s));
      for (unsigned i = 0; i < 70; ++i) CHECK((third->results()[i] == Status::kOk) == (i == 1));
    }
  }
  CHECK(counter(*engine, "disconnections") == 0);
  CHECK(counter(*engine, "damaged_length") == 0);
}

// What keys of one command took of the window is free again however they end: else a connection takes no more.
TEST(resp_keys_of_one_command_leave_the_window) {
  constexpr unsigned kKeys = 500;
  std::atomic<int> answer = 0;
  RespServer server([&](Peer& peer, const Command& command) {
    if (command[0] != "EXISTS" && command[0] != "TOUCH") return false;
    if (answer == 1) std::this_thread::sleep_for(2ms);
    if (answer != 2 || command.size() <= 2) return false;
    peer.write("-BUSY Valkey is busy running a script\r\n");
    return true;
  });
  for (unsigned i = 0; i < kKeys; i += 3) keep(server, make_key(i), make_payload(10));
  const auto engine = connect(server);
  for (unsigned round = 0; round < 60; ++round) {
    answer = static_cast<int>(round % 3);
    const auto batch =
        submit(*engine, round % 2 == 0 ? Op::kTouch : Op::kContains, make_keys(kKeys), nullptr, 60s);
    if (answer == 1) {
      std::this_thread::sleep_for(std::chrono::microseconds(300 * (round % 7)));
      batch->cancel();
    }
    CHECK(batch->wait_until(Clock::now() + 20s));
    for (unsigned i = 0; i < kKeys && answer != 1; ++i) {
      CHECK(batch->results()[i] == (i % 3 == 0 ? Status::kOk : Status::kMiss));
    }
  }
  CHECK(counter(*engine, "queued") == 0);
  CHECK(counter(*engine, "disconnections") == 0);
}

TEST(resp_a_put_cancelled_in_the_middle_leaves_nothing_torn) {
  Gate gate;
  std::atomic<bool> armed = true;
  RespServer server([&](Peer&, const Command& command) {
    // Does not read on while it waits, so that a large put fills the socket.
    if (command[0] == "EXISTS" && armed.exchange(false)) gate.pass();
    return false;
  });
  const auto engine = connect(server);
  const auto blocker = submit(*engine, Op::kContains, {make_key(9)}, nullptr, 60s);
  CHECK(eventually([&] { return gate.somebody_waits(); }));
  std::vector<Bytes> large(1, make_payload(64 << 20));
  const auto put = submit(*engine, Op::kPut, {make_key(0)}, &large, 60s);
  CHECK(eventually([&] { return counter(*engine, "queued") == 0; }));
  put->cancel();
  CHECK(put->wait_until(Clock::now() + 10s));
  CHECK(put->results()[0] == Status::kCancelled);
  large.clear();
  large.shrink_to_fit();
  gate.open();
  CHECK(blocker->wait_until(Clock::now() + 10s));
  CHECK(blocker->results()[0] == Status::kMiss);
  CHECK(!server.has(make_key(0).text));
}

// What is left of it is sent as zeros, in a transaction that comes to nothing.
TEST(resp_a_put_given_up_in_the_middle_keeps_its_connection) {
  for (const bool cancelled : {true, false}) {
    Gate gate;
    std::atomic<bool> armed = true;
    RespServer server([&](Peer&, const Command& command) {
      if (command[0] == "MULTI" && armed.exchange(false)) gate.pass();
      return false;
    });
    const auto engine = connect(server);
    std::vector<Bytes> value(1, make_payload(7 << 20));
    std::vector<Bytes> other(1, make_payload(1000));
    const auto begun = Clock::now();
    const auto put = submit(*engine, Op::kPut, {make_key(0)}, &value, cancelled ? 60s : 4s);
    const auto behind = submit(*engine, Op::kPut, {make_key(1)}, &other, 60s);
    CHECK(eventually([&] { return gate.somebody_waits(); }));
    if (cancelled) {
      put->cancel();
      CHECK(put->wait_until(Clock::now() + 10s));
      value[0].assign(value[0].size(), std::byte{0xee});
      gate.open();
    } else {
      // It moves until shortly before its time is over: the server is slow, and not silent.
      CHECK(!put->wait_until(begun + 3400ms));
      gate.open();
      CHECK(put->wait_until(Clock::now() + 10s));
    }
    CHECK(behind->wait_until(Clock::now() + 10s));
    CHECK(behind->results()[0] == Status::kOk);
    CHECK(!cancelled || put->results()[0] == Status::kCancelled);
    CHECK(!cancelled || !server.has(make_key(0).text));
    CHECK(counter(*engine, "disconnections") == 0);
  }
}

TEST(resp_a_load_does_not_wait_for_a_put) {
  Gate gate;
  const Bytes value = make_payload(1000);
  RespServer server([&](Peer&, const Command& command) {
    if (command[0] == "MULTI") gate.pass();  // reads no further
    return false;
  });
  keep(server, make_key(0), value);
  const auto engine = connect(server);
  std::vector<Bytes> sources(8, make_payload(4 << 20));
  std::vector<Key> written;
  for (unsigned i = 1; i <= 8; ++i) written.push_back(make_key(i));
  const auto puts = submit(*engine, Op::kPut, written, &sources, 60s);
  CHECK(eventually([&] { return gate.somebody_waits(); }));
  for (int round = 0; round < 20; ++round) {
    Bytes target(1000);
    CHECK(run_one(*engine, Op::kGet, make_key(0), &target, 5s) == Status::kOk && target == value);
    CHECK(run_one(*engine, Op::kTouch, make_key(0), nullptr, 5s) == Status::kOk);
  }
  CHECK(!puts->done());
  gate.open();
  CHECK(puts->wait_until(Clock::now() + 30s));
  for (const Status status : puts->results()) CHECK(status == Status::kOk);
  CHECK(counter(*engine, "disconnections") == 0);
}

// As a load has it behind a slow lookup: the server only pauses.
TEST(resp_an_item_that_wants_its_answer_soon_ends_nobody_elses) {
  Gate gate;
  const Bytes value = make_payload(1000);
  std::atomic<bool> pauses = false;
  RespServer server([&](Peer&, const Command& command) {
    if (pauses && command[0] == "HMGET") gate.pass();
    return false;
  });
  const auto engine = connect(server);
  Bytes source = value;
  CHECK(run_one(*engine, Op::kPut, make_key(0), &source) == Status::kOk);
  pauses = true;
  std::vector<Bytes> target(1, Bytes(value.size()));
  const auto get = submit(*engine, Op::kGet, {make_key(0)}, &target, 60s);
  CHECK(eventually([&] { return gate.somebody_waits(); }));
  CHECK(run_one(*engine, Op::kContains, make_key(1), nullptr, 1ms) == Status::kTimedOut);
  gate.open();
  CHECK(get->wait_until(Clock::now() + 60s) && get->results()[0] == Status::kOk && target[0] == value);
  CHECK(counter(*engine, "disconnections") == 0);
}

// A value that takes longer than its deadline costs itself and nobody else, as long as its bytes come.
TEST(resp_a_slow_reply_is_no_silence) {
  const Bytes value = make_payload(200'000);
  std::atomic<bool> slow = true;
  RespServer server([&](Peer& peer, const Command& command) {
    if (command[0] != "HMGET" || !slow.exchange(false)) return false;
    const std::string reply = good_reply(make_key(0), value);
    for (std::size_t at = 0; at < reply.size(); at += 2000) {
      peer.write(std::string_view(reply).substr(at, 2000));
      std::this_thread::sleep_for(10ms);  // the link is slow
    }
    return true;
  });
  const auto engine = connect(server);
  std::vector<Bytes> first(1, Bytes(value.size()));
  const auto late = submit(*engine, Op::kGet, {make_key(0)}, &first, 400ms);
  const auto behind = submit(*engine, Op::kContains, make_keys(10), nullptr, 20s);
  CHECK(late->wait_until(Clock::now() + 10s));
  CHECK(late->results()[0] == Status::kTimedOut);
  CHECK(behind->wait_until(Clock::now() + 20s));
  for (const Status status : behind->results()) CHECK(status == Status::kMiss);
  CHECK(counter(*engine, "disconnections") == 0);
}

// The time to live of a key in use is looked at once in a while, and begins anew when a quarter of it is over.
TEST(resp_a_key_in_use_is_renewed_now_and_then) {
  std::atomic<int> looks = 0;
  std::atomic<int> renewals = 0;
  RespServer server([&](Peer& peer, const Command& command) {
    if (command[0] == "PTTL") {
      ++looks;
      const bool is_old = command[1] == make_key(1).text || command[1] == make_key(2).text;
      peer.write(is_old ? (command[1] == make_key(1).text ? ":64800000\r\n" : ":-1\r\n") : ":64800001\r\n");
      return true;
    }
    renewals += command[0] == "PEXPIRE";
    return false;
  });
  const Bytes value = make_payload(1000);
  for (unsigned i = 0; i < 4; ++i) {
    keep(server, make_key(i), value);
  }
  const auto engine = connect(server);
  for (int round = 0; round < 50; ++round) {
    CHECK(run(*engine, Op::kContains, make_keys(4), nullptr) == std::vector<Status>(4, Status::kOk));
  }
  CHECK(looks == 0);  // to look is no use
  for (int round = 0; round < 50; ++round) {
    CHECK(run(*engine, Op::kTouch, make_keys(3), nullptr) == std::vector<Status>(3, Status::kOk));
    Bytes target(1000);
    CHECK(run_one(*engine, Op::kGet, make_key(3), &target) == Status::kOk);
  }
  CHECK(eventually([&] { return looks == 4 && renewals == 2; }));
  CHECK(run_one(*engine, Op::kTouch, make_key(9), nullptr) == Status::kMiss);
  CHECK(looks == 4);
}

// Keys are asked for ahead of the puts, and only values that are missing are sent.
TEST(resp_a_put_if_absent_sends_what_is_missing) {
  std::atomic<int> sent = 0;
  RespServer server([&](Peer&, const Command& command) {
    sent += command[0] == "HSET";
    return false;
  });
  constexpr unsigned kKeys = 40;
  std::vector<Bytes> values;
  for (unsigned i = 0; i < kKeys; ++i) values.push_back(make_payload(300'000, i + 1));
  for (unsigned i = 0; i < kKeys; i += 2) {
    keep(server, make_key(i), values[i]);
  }
  const auto engine = connect(server, 2);
  const auto results = run(*engine, Op::kPutAbsent, make_keys(kKeys), &values);
  for (unsigned i = 0; i < kKeys; ++i) CHECK(results[i] == (i % 2 == 0 ? Status::kPresent : Status::kOk));
  CHECK(sent == kKeys / 2);
  for (unsigned i = 0; i < kKeys; ++i) CHECK(gets(*engine, make_key(i), values[i]));
  CHECK(counter(*engine, "disconnections") == 0);
}

// Between the answer to its question and the end of its put: a fault, nothing half, and the next one is served.
TEST(resp_a_put_if_absent_that_is_cut_is_a_fault) {
  for (const std::string cut_at : {"TOUCH", "MULTI", "HSET", "PEXPIRE", "EXEC"}) {
    std::atomic<bool> cuts = true;
    RespServer server([&](Peer& peer, const Command& command) {
      if (command[0] != cut_at || !cuts.exchange(false)) return false;
      peer.hang_up();
      return true;
    });
    const auto engine = connect(server);
    Bytes value = make_payload(300'000);
    CHECK(run_one(*engine, Op::kPutAbsent, make_key(0), &value) == Status::kFault);
    CHECK(!server.has(make_key(0).text));
    CHECK(eventually([&] { return run_one(*engine, Op::kPutAbsent, make_key(0), &value) == Status::kOk; }));
    CHECK(gets(*engine, make_key(0), value));
    CHECK(run_one(*engine, Op::kPutAbsent, make_key(0), &value) == Status::kPresent);
  }
}

// The answer comes, and then the connection goes: what was not sent yet goes over the next one, or is a fault.
TEST(resp_a_put_if_absent_goes_on_after_its_connection_has_gone) {
  std::atomic<bool> cuts = true;
  RespServer server([&](Peer& peer, const Command& command) {
    if (command[0] != "TOUCH" || !cuts.exchange(false)) return false;
    peer.write(":0\r\n");
    peer.hang_up();
    return true;
  });
  const auto engine = connect(server);
  Bytes value = make_payload(300'000);
  const Status first = run_one(*engine, Op::kPutAbsent, make_key(0), &value);
  CHECK(first == Status::kOk || first == Status::kFault);
  CHECK((first == Status::kOk) == server.has(make_key(0).text));
  CHECK(eventually([&] {
    const Status again = run_one(*engine, Op::kPutAbsent, make_key(0), &value);
    return again == Status::kOk || again == Status::kPresent;
  }));
  CHECK(gets(*engine, make_key(0), value));
}

// Given up while its question is on the way: no value is sent.
TEST(resp_a_put_if_absent_given_up_before_its_answer_sends_nothing) {
  Gate gate;
  std::atomic<int> sent = 0;
  RespServer server([&](Peer&, const Command& command) {
    if (command[0] == "TOUCH") gate.pass();
    sent += command[0] == "HSET";
    return false;
  });
  const auto engine = connect(server);
  std::vector<Bytes> values(1, make_payload(300'000));
  const auto late = submit(*engine, Op::kPutAbsent, {make_key(0)}, &values, 300ms);
  const auto cancelled = submit(*engine, Op::kPutAbsent, {make_key(1)}, &values, 20s);
  CHECK(eventually([&] { return gate.somebody_waits(); }));
  cancelled->cancel();
  CHECK(cancelled->wait_until(Clock::now() + 10s) && cancelled->results()[0] == Status::kCancelled);
  CHECK(late->wait_until(Clock::now() + 10s) && late->results()[0] == Status::kTimedOut);
  gate.open();
  CHECK(eventually([&] { return run_one(*engine, Op::kPutAbsent, make_key(2), &values[0]) == Status::kOk; }));
  CHECK(sent == 1 && !server.has(make_key(0).text) && !server.has(make_key(1).text));
}

// Good, slow and misbehaving by turns, while batches are cancelled at any point: the sanitizers see who touches a
// buffer that was given back, or races with its owner.
TEST(resp_batches_cancelled_at_any_point_leave_nothing_behind) {
  constexpr unsigned kKeys = 6;
  const Bytes value = make_payload(150'000);
  std::atomic<unsigned> turns = 0;
  std::atomic<bool> good = false;
  Gate silence;
  RespServer server([&](Peer& peer, const Command& command) {
    if (good || command[0] == "PING") return false;
    std::minstd_rand random(turns.fetch_add(1) + 1);
    random.discard(3);
    switch (random() % 40) {
      case 0:
        peer.hang_up();
        return true;
      case 1:
        peer.write("garbage\r\n");
        return true;
      case 2:  // says nothing more: what waits on this connection is over at its deadline
        silence.pass();
        peer.hang_up();
        return true;
      case 3:
      case 4:
      case 5:
        if (command[0] != "HMGET") return false;
        for (const std::string reply = good_reply(parse_key(command[1]), value);
             const char* piece : {"1", "2"}) {
          const std::size_t half = reply.size() / 2;
          peer.write(*piece == '1' ? std::string_view(reply).substr(0, half)
                                   : std::string_view(reply).substr(half));
          std::this_thread::sleep_for(1ms);
        }
        return true;
      case 6:
      case 7:
      case 8:
        if (command[0] != "TOUCH") return false;
        peer.write(":0\r\n");  // so that it is put again
        return true;
      default:
        return false;
    }
  });
  for (unsigned i = 0; i < kKeys; ++i) {
    keep(server, make_key(i), value);
  }
  const auto engine = connect(server, 3);
  std::atomic<unsigned> hits = 0;
  std::vector<std::thread> clients;
  for (unsigned seed = 1; seed <= 4; ++seed) {
    clients.emplace_back([&, seed] {
      std::minstd_rand random(seed);
      for (int round = 0; round < 150; ++round) {
        const auto draw = random() % 6;
        const Op op = draw == 0 ? Op::kPut : draw == 1 ? Op::kPutAbsent : Op::kGet;
        const auto keys = make_keys(kKeys);
        std::vector<Bytes> buffers(kKeys, is_put(op) ? value : Bytes(value.size()));
        auto batch = submit(*engine, op, keys, &buffers, 300ms);
        // From at once to well after its end, which on a slow machine is the one that was not hurried.
        const auto patience = round % 4 == 0 ? 300'000 : random() % 3000;
        if (!batch->wait_until(Clock::now() + std::chrono::microseconds(patience))) batch->cancel();
        CHECK(batch->wait_until(Clock::now() + 10s));
        for (unsigned i = 0; i < kKeys; ++i) {
          if (batch->results()[i] != Status::kOk) continue;
          CHECK(buffers[i] == value);
          hits += op == Op::kGet;
        }
        for (Bytes& buffer : buffers) std::fill(buffer.begin(), buffer.end(), std::byte{0xee});
      }
    });
  }
  for (auto& client : clients) client.join();
  CHECK(hits != 0);
  CHECK(counter(*engine, "cancelled") != 0);
  // A put that was cancelled, and freed, has left no byte of what came into its place.
  CHECK(counter(*engine, "damaged") == 0);
  good = true;
  silence.open();
  for (unsigned i = 0; i < kKeys; ++i) {
    const auto kept = server.value(make_key(i).text);
    for (const auto& [name, field] : fields(make_key(i), value)) CHECK(kept.at(name) == field);
    CHECK(gets(*engine, make_key(i), value));
  }
  CHECK(counter(*engine, "queued") == 0);
  CHECK(engine->close(5s));
}

TEST(resp_closing_does_not_wait_for_the_server) {
  Gate gate;
  RespServer server([&](Peer&, const Command& command) {
    if (command[0] == "PING") return false;
    gate.pass();
    return true;
  });
  const auto engine = connect(server, 2);
  std::vector<Bytes> targets(40, Bytes(100'000));
  const auto batch = submit(*engine, Op::kGet, make_keys(40), &targets, 60s);
  CHECK(eventually([&] { return gate.somebody_waits(); }));
  const auto begin = Clock::now();
  CHECK(engine->close(5s));
  CHECK(Clock::now() - begin < 2s);
  CHECK(batch->done());
  for (const Status status : batch->results()) CHECK(status == Status::kCancelled);
  gate.open();
}

TEST(resp_two_lanes_serve_while_one_is_cut) {
  std::atomic<int> cuts = 0;
  RespServer server([&](Peer& peer, const Command& command) {
    if (command[0] != "EXISTS" || cuts.fetch_add(1) % 50 != 49) return false;
    peer.hang_up();
    return true;
  });
  const auto engine = connect(server, 2);
  std::size_t answered = 0;
  for (int round = 0; round < 200; ++round) {
    for (const Status status : run(*engine, Op::kContains, make_keys(3), nullptr)) {
      CHECK(status == Status::kMiss || status == Status::kFault);
      answered += status == Status::kMiss;
    }
  }
  CHECK(answered > 500);
}

TEST(resp_refusals_at_open_are_in_the_servers_words_without_the_password) {
  RespServer server([&](Peer& peer, const Command& command) {
    if (command[0] != "AUTH") return false;
    peer.write("-WRONGPASS invalid pair " + command[2] + "\r\n");
    return true;
  });
  RespSettings settings;
  settings.endpoint = {"127.0.0.1", server.port(), ""};
  settings.user = "worker";
  settings.password = "hunter2";
  try {
    const RespBackend backend(settings);
    CHECK(false);
  } catch (const RespError& error) {
    const std::string words = error.what();
    CHECK(words.find("AUTH: WRONGPASS invalid pair ***") != std::string::npos);
    CHECK(words.find("hunter2") == std::string::npos);
  }
}

TEST(resp_open_tells_what_cannot_be_reached) {
  std::uint16_t port = 0;
  {
    RespServer server;
    port = server.port();
  }
  RespSettings settings;
  settings.endpoint = {"127.0.0.1", port, ""};
  CHECK_THROWS(Unreachable, RespBackend(settings));
  std::string folder = (std::filesystem::temp_directory_path() / "kvpool-test-XXXXXX").string();
  CHECK(mkdtemp(folder.data()) != nullptr);
  settings.endpoint = {"", 0, folder + "/socket"};
  CHECK_THROWS(Unreachable, RespBackend(settings));
  std::filesystem::remove(folder);
  settings.endpoint = {"", 0, std::string(108, 'x')};
  CHECK_THROWS(Unreachable, RespBackend(settings));
  RespServer garbage([](Peer& peer, const Command&) {
    peer.write("HTTP/1.1 400 Bad Request\r\n");
    return true;
  });
  settings.endpoint = {"127.0.0.1", garbage.port(), ""};
  CHECK_THROWS(Unreachable, RespBackend(settings));
}

}  // namespace kvpool
