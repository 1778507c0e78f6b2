// Which server holds which key, and how the backend follows servers that send it elsewhere.
#include "store/topology.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "store/executors.h"
#include "store/resp.h"
#include "store/resp_server.h"

namespace kvpool {
namespace {

using namespace std::chrono_literals;
using test::Bytes;
using test::Command;
using test::eventually;
using test::make_key;
using test::make_payload;
using test::Peer;
using test::RespServer;

constexpr unsigned kLast = kSlots - 1;

// An executor on a topology that the test installs.
struct Store {
  std::shared_ptr<Topology> topology = std::make_shared<Topology>(RespSettings());
  IoExecutor engine;

  explicit Store(const std::vector<NodeSlots>& nodes, unsigned io_threads = 1)
      : engine(std::make_unique<RespBackend>(topology), io_threads) {
    if (!nodes.empty()) topology->install(nodes);
  }

  std::vector<Status> run(Op op, const std::vector<Key>& keys, std::vector<Bytes>* buffers = nullptr,
                          Clock::duration timeout = 10s, std::string* error = nullptr) {
    std::vector<Batch::Buffer> views;
    if (buffers != nullptr) views.assign(buffers->begin(), buffers->end());
    const auto batch = engine.submit(op, keys, std::move(views), timeout);
    CHECK(batch->wait_until(Clock::now() + timeout + 5s));
    if (error != nullptr) *error = batch->error().value_or("");
    return {batch->results().begin(), batch->results().end()};
  }

  std::uint64_t counter(const std::string& name) { return test::counter(engine, name); }

  bool is_stale() { return topology->wait_until_stale(Clock::now()); }
};

NodeSlots all_of(const RespServer& server) { return {"127.0.0.1", server.port(), {{0, kLast}}}; }

std::string address(const RespServer& server) { return "127.0.0.1:" + std::to_string(server.port()); }

// Answers every command on a key with these words.
RespServer::Hook always(std::string words) {
  return [words = std::move(words)](Peer& peer, const Command& command) {
    if (command.size() < 2) return false;
    peer.write("-" + words + "\r\n");
    return true;
  };
}

}  // namespace

TEST(slots_are_those_of_the_cluster_specification) {
  CHECK(slot_of("123456789") == 0x31C3 % kSlots);
  CHECK(slot_of("") == 0);
  CHECK(slot_of("foo") == 12182);
  // By binascii.crc_hqx(key, 0) % 16384.
  CHECK(slot_of("kvpool:default:de0c1e4a") == 6235);
  CHECK(slot_of("kvpool:default:de0c1e4a1") == 16323);
  CHECK(slot_of("bar") == 5061);
  CHECK(slot_of("hello") == 866);
  CHECK(slot_of("{user1000}.following") == slot_of("user1000"));
  CHECK(slot_of("foo{}{bar}") == 8363);  // an empty tag is none
  CHECK(slot_of("foo{{bar}}zap") == slot_of("{bar"));
  CHECK(slot_of("foo{bar}{zap}") == slot_of("bar"));
  CHECK(slot_of("foo{bar") != slot_of("bar"));
  CHECK(slot_of("\xff\xfe") < kSlots);
}

TEST(topology_refuses_what_makes_no_sense) {
  Topology topology{RespSettings()};
  const auto refuses = [&](const std::vector<NodeSlots>& nodes) {
    try {
      topology.install(nodes);
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  CHECK(refuses({}));
  CHECK(refuses({{"", 1, {}}}));
  CHECK(refuses({{"a b", 1, {}}}));
  CHECK(refuses({{std::string(254, 'a'), 1, {}}}));
  CHECK(refuses({{"a", 0, {}}}));
  CHECK(refuses({{"a", 65536, {}}}));
  CHECK(refuses({{"127.0.0.1", 1, {{0, kSlots}}}}));
  CHECK(refuses({{"127.0.0.1", 1, {{5, 4}}}}));
  CHECK(refuses(std::vector<NodeSlots>(kMaxNodes + 1, NodeSlots{"127.0.0.1", 1, {}})));
  CHECK(!refuses({{"127.0.0.1", 1, {{0, kLast}}}}));
}

TEST(topology_wakes_who_waits_until_it_is_stale) {
  Topology topology{RespSettings()};
  CHECK(!topology.wait_until_stale(Clock::now() + 1ms));
  topology.mark_stale();
  topology.mark_stale();
  CHECK(topology.wait_until_stale(Clock::now() + 10s));
  CHECK(!topology.wait_until_stale(Clock::now()));
  std::thread other([&] { topology.close(); });
  CHECK(!topology.wait_until_stale(Clock::now() + 10s));
  other.join();
  CHECK(topology.closed());
}

TEST(cluster_keys_go_to_the_node_of_their_slot) {
  RespServer low, high;
  Store store({{"127.0.0.1", low.port(), {{0, 8191}}}, {"127.0.0.1", high.port(), {{8192, kLast}}}}, 2);
  std::vector<Key> keys;
  std::vector<Bytes> values, targets;
  for (unsigned i = 0; i < 100; ++i) {
    keys.push_back(make_key(i));
    values.push_back(make_payload(1 + 700 * i, i));
    targets.emplace_back(values.back().size());
  }
  CHECK(store.run(Op::kPut, keys, &values) == std::vector<Status>(100, Status::kOk));
  CHECK(store.run(Op::kGet, keys, &targets) == std::vector<Status>(100, Status::kOk));
  CHECK(targets == values);
  for (const Key& key : keys) {
    CHECK(low.has(key.text) == (slot_of(key.text) < 8192));
    CHECK(high.has(key.text) == (slot_of(key.text) >= 8192));
  }
  CHECK(store.counter("moved") == 0);
}

// Nodes refuse keys of several slots in one command, and count each refusal among their errors.
TEST(cluster_keys_are_asked_for_one_by_one) {
  std::atomic<unsigned> joined = 0;
  const RespServer::Hook refuse = [&](Peer& peer, const Command& command) {
    if (command[0] != "EXISTS" || command.size() == 2) return false;
    ++joined;
    peer.write("-CROSSSLOT Keys in request don't hash to the same slot\r\n");
    return true;
  };
  RespServer low(refuse), high(refuse);
  Store store({{"127.0.0.1", low.port(), {{0, 8191}}}, {"127.0.0.1", high.port(), {{8192, kLast}}}});
  CHECK(store.run(Op::kContains, test::make_keys(100)) == std::vector<Status>(100, Status::kMiss));
  CHECK(joined == 0);
}

TEST(cluster_without_a_map_or_with_a_hole_says_which_slot) {
  RespServer server;
  Store store({});
  std::string error;
  CHECK(store.run(Op::kContains, {make_key(1)}, nullptr, 10s, &error)[0] == Status::kFault);
  CHECK(error == "no node serves slot " + std::to_string(slot_of(make_key(1).text)));
  CHECK(store.is_stale());
  store.topology->install({all_of(server)});
  CHECK(store.run(Op::kContains, {make_key(1)})[0] == Status::kMiss);
}

TEST(cluster_moved_and_ask_are_followed_for_every_operation) {
  for (const bool asks : {false, true}) {
    std::atomic<int> asking{0};
    RespServer to([&](Peer& peer, const Command& command) {
      if (command[0] != "ASKING") return false;
      ++asking;
      peer.write("+OK\r\n");
      return true;
    });
    RespServer from(always((asks ? "ASK 3 " : "MOVED 3 ") + address(to)));
    Store store({all_of(from)});
    for (const std::size_t nbytes : {1UL, 128UL, 5000UL, 1000000UL}) {
      std::vector<Bytes> values = {make_payload(nbytes), make_payload(nbytes, 2)};
      std::vector<Bytes> targets(2, Bytes(nbytes));
      const std::vector<Key> keys = {make_key(1), make_key(2)};
      CHECK(store.run(Op::kPut, keys, &values) == std::vector<Status>(2, Status::kOk));
      CHECK(store.run(Op::kGet, keys, &targets) == std::vector<Status>(2, Status::kOk));
      CHECK(targets == values);
      CHECK(store.run(Op::kContains, keys) == std::vector<Status>(2, Status::kOk));
      CHECK(store.run(Op::kDelete, keys) == std::vector<Status>(2, Status::kOk));
      CHECK(store.run(Op::kGet, keys, &targets) == std::vector<Status>(2, Status::kMiss));
    }
    CHECK(store.counter(asks ? "asked" : "moved") == 4 * 10);
    CHECK(store.counter(asks ? "moved" : "asked") == 0);
    CHECK(asking == (asks ? 4 * 10 : 0));  // once for each command, and for the transaction of a put
    CHECK(store.is_stale() == !asks);
    CHECK(store.counter("disconnections") == 0);
  }
}

TEST(cluster_a_damaged_record_behind_a_redirect_goes) {
  RespServer to([&](Peer& peer, const Command& command) {
    if (command[0] != "ASKING") return false;
    peer.write("+OK\r\n");
    return true;
  });
  RespServer from(always("ASK 3 " + address(to)));
  Store store({all_of(from)});
  to.set(make_key(1).text, "h", "no header");
  to.set(make_key(1).text, "b", "nobody");
  std::vector<Bytes> targets = {Bytes(1000)};
  CHECK(store.run(Op::kGet, {make_key(1)}, &targets)[0] == Status::kMiss);
  CHECK(!to.has(make_key(1).text));
}

TEST(cluster_an_empty_host_is_the_same_one) {
  RespServer to;
  RespServer from(always("MOVED 3 :" + std::to_string(to.port())));
  Store store({all_of(from)});
  CHECK(store.run(Op::kContains, {make_key(1)})[0] == Status::kMiss);
  CHECK(store.counter("moved") == 1);
}

TEST(cluster_servers_that_send_us_round_are_a_fault) {
  RespServer* first = nullptr;
  RespServer second([&](Peer& peer, const Command& command) {
    return always("MOVED 3 " + address(*first))(peer, command);
  });
  RespServer one(always("MOVED 3 " + address(second)));
  first = &one;
  Store store({all_of(one)});
  std::string error;
  std::vector<Bytes> values = {make_payload(300)};
  CHECK(store.run(Op::kContains, {make_key(1)}, nullptr, 10s, &error)[0] == Status::kFault);
  CHECK(error.find("MOVED 3 127.0.0.1:") != std::string::npos);
  CHECK(store.run(Op::kPut, {make_key(1)}, &values)[0] == Status::kFault);
  CHECK(store.counter("moved") == 2 * 5);
  CHECK(one.commands().size() == 3 * (1 + 4));  // a put is a transaction of four
}

TEST(cluster_redirects_that_make_no_sense_are_faults) {
  for (const char* words : {"MOVED", "MOVED 3", "MOVED 3 127.0.0.1", "MOVED 3 127.0.0.1:", "MOVED 3 a/b:7000",
                            "MOVED 3 127.0.0.1:0", "MOVED 3 127.0.0.1:70000", "MOVED 3 127.0.0.1:99999999999",
                            "ASK 3 127.0.0.1:7x", "MOVED 3 a-name-that-is-not-known:7000"}) {
    RespServer server(always(words));
    Store store({all_of(server)});
    CHECK(store.run(Op::kContains, {make_key(1)})[0] == Status::kFault);
    CHECK(store.counter("disconnections") == 0);
  }
}

TEST(cluster_errors_that_pass_are_faults_and_mark_it_stale) {
  for (const char* words : {"READONLY You can't write against a read only replica.",
                            "CLUSTERDOWN Hash slot not served", "MASTERDOWN Link with MASTER is down"}) {
    RespServer server(always(words));
    Store store({all_of(server)});
    std::string error;
    CHECK(store.run(Op::kDelete, {make_key(1)}, nullptr, 10s, &error)[0] == Status::kFault);
    CHECK(error.find(words) != std::string::npos);
    CHECK(store.is_stale());
    CHECK(store.counter("disconnections") == 0);
  }
}

TEST(cluster_a_node_that_is_gone_is_a_fault_at_once_and_the_others_answer) {
  RespServer low, high;
  Store store({{"127.0.0.1", low.port(), {{0, 8191}}}, {"127.0.0.1", high.port(), {{8192, kLast}}}});
  std::vector<Key> keys;
  for (unsigned i = 0; i < 50; ++i) keys.push_back(make_key(i));
  CHECK(store.run(Op::kContains, keys) == std::vector<Status>(50, Status::kMiss));
  high.go_away();
  CHECK(eventually([&] {
    const auto results = store.run(Op::kContains, keys, nullptr, 60s);
    bool as_expected = true;
    for (unsigned i = 0; i < 50; ++i) {
      as_expected &= results[i] == (slot_of(keys[i].text) < 8192 ? Status::kMiss : Status::kFault);
    }
    return as_expected;
  }));
  CHECK(store.is_stale());
  // What the others are told puts things right.
  store.topology->install({all_of(low)});
  CHECK(store.run(Op::kContains, keys) == std::vector<Status>(50, Status::kMiss));
}

TEST(cluster_a_node_that_is_silent_holds_up_no_other) {
  std::atomic<bool> silent{false};
  RespServer low;
  RespServer high([&](Peer&, const Command& command) { return silent.load() && command[0] != "PING"; });
  Store store({{"127.0.0.1", low.port(), {{0, 8191}}}, {"127.0.0.1", high.port(), {{8192, kLast}}}});
  std::vector<Key> lows, highs;
  for (unsigned i = 0; lows.size() < 20 || highs.size() < 150; ++i) {
    const Key key = make_key(i);
    (slot_of(key.text) < 8192 ? lows : highs).push_back(key);
  }
  lows.resize(20);
  highs.resize(150);
  std::vector<Bytes> values(20, make_payload(200'000)), others(150, values[0]);
  CHECK(store.run(Op::kPut, lows, &values) == std::vector<Status>(20, Status::kOk));
  silent = true;
  std::vector<Batch::Buffer> views(others.begin(), others.end());
  // More than the send window and what may wait.
  const auto stuck = store.engine.submit(Op::kGet, highs, views, 5s);
  std::vector<Bytes> targets(20, Bytes(200'000));
  CHECK(store.run(Op::kGet, lows, &targets, 60s) == std::vector<Status>(20, Status::kOk));
  CHECK(targets == values);
  CHECK(!stuck->done());
  CHECK(stuck->wait_until(Clock::now() + 30s));
  for (const Status status : stuck->results()) CHECK(status == Status::kFault || status == Status::kTimedOut);
}

TEST(cluster_a_new_map_moves_what_waits) {
  RespServer old([](Peer&, const Command& command) { return command[0] != "PING"; });  // never answers
  RespServer fresh;
  Store store({all_of(old)});
  std::vector<Bytes> values(4, make_payload(1 << 20));
  std::vector<Batch::Buffer> views(values.begin(), values.end());
  std::vector<Key> keys = {make_key(1), make_key(2), make_key(3), make_key(4)};
  const auto stuck = store.engine.submit(Op::kGet, keys, views, 3s);
  CHECK(eventually([&] { return old.connections() == 1; }));
  store.topology->install({all_of(fresh)});
  CHECK(store.run(Op::kContains, {make_key(9)})[0] == Status::kMiss);
  CHECK(stuck->wait_until(Clock::now() + 30s));
  CHECK(std::count(stuck->results().begin(), stuck->results().end(), Status::kMiss) >= 1);
  // The connection that nobody needs any more is closed.
  store.topology->install({all_of(fresh)});
  CHECK(store.run(Op::kContains, {make_key(9)})[0] == Status::kMiss);
  CHECK(store.counter("up_connections") == 1);
}

}  // namespace kvpool
