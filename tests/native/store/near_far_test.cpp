// A near pool before a far one, of two directories: what goes where, and that nothing outlives a close.
// Over 400 lines because each fault of either pool is a test here.
#include "store/near_far/near_far.h"

#include <array>
#include <atomic>
#include <cstring>
#include <list>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "store/directory.h"
#include "store/executors.h"
#include "store/file.h"
#include "store/near_far/shards.h"

namespace kvpool {
namespace {

using namespace std::chrono_literals;

using test::Bytes;
using test::counter;
using test::Directory;
using test::eventually;
using test::make_key;
using test::make_payload;

constexpr std::size_t kNbytes = 3000;

Bytes value_of(unsigned number, std::size_t nbytes = kNbytes) { return make_payload(nbytes, number); }

struct Pools {
  explicit Pools(bool all = true, std::uint64_t far_nbytes = 64 << 20) {
    near = open("near", 64 << 20);
    far = open("far", far_nbytes);
    both = std::make_unique<IoExecutor>(std::make_unique<NearFarBackend>(near, far, all), 1);
  }
  std::shared_ptr<IoExecutor> open(const std::string& name, std::uint64_t nbytes) const {
    return std::make_shared<IoExecutor>(
        std::make_unique<FileBackend>((root / name).string(), nbytes, Patience(60s)), 2);
  }
  // `near` or `far` anew, with a backend of the test's own.
  template <class Own>
  Own& replace(std::shared_ptr<IoExecutor>& pool, unsigned threads = 1) {
    auto backend = std::make_unique<Own>();
    Own& own = *backend;
    pool = std::make_shared<IoExecutor>(std::move(backend), threads);
    both = std::make_unique<IoExecutor>(std::make_unique<NearFarBackend>(near, far, true), 1);
    return own;
  }

  Directory root;  // goes last
  std::shared_ptr<IoExecutor> near, far;
  std::unique_ptr<IoExecutor> both;
};

std::shared_ptr<Batch> submit(IoExecutor& executor, Op op, const std::vector<unsigned>& numbers,
                              std::vector<Bytes>& values) {
  std::vector<Key> keys;
  std::vector<Batch::Buffer> buffers;
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    keys.push_back(make_key(numbers[i]));
    if (moves_bytes(op)) buffers.emplace_back(values[i]);
  }
  return executor.submit(op, std::move(keys), std::move(buffers), 60s);
}

std::vector<Status> run(IoExecutor& executor, Op op, const std::vector<unsigned>& numbers,
                        std::vector<Bytes>& values) {
  const auto batch = submit(executor, op, numbers, values);
  CHECK(batch->wait_until(Clock::now() + 60s));
  return {batch->results().begin(), batch->results().end()};
}

Status run_one(IoExecutor& executor, Op op, unsigned number, Bytes value = {}) {
  std::vector<Bytes> values{std::move(value)};
  return run(executor, op, {number}, values)[0];
}

void wait_behind(const Pools& pools) {
  CHECK(eventually([&] { return counter(*pools.both, "behind_waiting") == 0; }));
}

bool was_read(Status status) { return status == Status::kOk || status == Status::kNear; }

// A lookup of the values 0 to `count` - 1. `prefetch_nbytes`: of each; 0: nothing is copied.
std::shared_ptr<Batch> look_up(IoExecutor& executor, unsigned count, std::size_t prefetch_nbytes) {
  constexpr std::size_t kHashNbytes = 8;  // as make_key() has them
  static const auto* const hashes = [] {
    auto* packed = new std::string;
    for (unsigned i = 0; i < 40; ++i) {
      const Key key = make_key(i);
      packed->append(key.hash_prefix.begin(), key.hash_prefix.begin() + kHashNbytes);
    }
    return packed;
  }();
  const std::string text = make_key(0).text;
  const std::string_view leading = std::string_view(*hashes).substr(0, count * kHashNbytes);
  LookupGroup group{leading, kHashNbytes, 0, 1, 16, true, prefetch_nbytes};
  const std::string prefix = text.substr(0, text.rfind(':', text.rfind(':', text.rfind(':') - 1) - 1) + 1);
  return executor.submit(std::make_unique<Lookup>(prefix, std::vector{group}), 60s);
}

// It copies near what only far has.
std::shared_ptr<Batch> prefetch(IoExecutor& executor, unsigned count) {
  return look_up(executor, count, kNbytes);
}

TEST(near_far_puts_go_far_behind_and_gets_fill_near) {
  const Pools pools;
  CHECK(run_one(*pools.both, Op::kPutAbsent, 1, value_of(1)) == Status::kOk);
  CHECK(run_one(*pools.near, Op::kContains, 1) == Status::kOk);
  wait_behind(pools);
  CHECK(run_one(*pools.far, Op::kContains, 1) == Status::kOk);

  CHECK(run_one(*pools.far, Op::kPut, 2, value_of(2)) == Status::kOk);
  std::vector<Bytes> read{Bytes(kNbytes)};
  CHECK(run(*pools.both, Op::kGet, {2}, read)[0] == Status::kOk);
  CHECK(read[0] == value_of(2));
  CHECK(eventually([&] { return run_one(*pools.near, Op::kContains, 2) == Status::kOk; }));
  CHECK(eventually([&] { return counter(*pools.both, "filled") == 1; }));
  CHECK(counter(*pools.both, "far_hits") == 1);
}

TEST(near_far_results_say_what_was_near) {
  const Pools pools;
  CHECK(run_one(*pools.near, Op::kPut, 0, value_of(0)) == Status::kOk);
  CHECK(run_one(*pools.far, Op::kPut, 1, value_of(1)) == Status::kOk);
  std::vector<Bytes> none{{}, {}, {}};
  const std::vector<Status> said{Status::kNear, Status::kOk, Status::kMiss};
  for (const Op op : {Op::kContains, Op::kTouch}) CHECK(run(*pools.both, op, {0, 1, 2}, none) == said);
  const auto found = look_up(*pools.both, 3, 0);
  CHECK(found->wait_until(Clock::now() + 60s));
  CHECK(std::vector(found->results().begin(), found->results().end()) == said);
  std::vector<Bytes> read{Bytes(kNbytes), Bytes(kNbytes), Bytes(kNbytes)};
  CHECK(run(*pools.both, Op::kGet, {0, 1, 2}, read) == said);
  CHECK(counter(*pools.both, "get_hits") == 2 && counter(*pools.both, "get_nbytes") == 2 * kNbytes);
  CHECK(counter(*pools.both, "contains_hits") == 6);
}

TEST(near_far_a_value_without_room_far_is_near) {
  const Pools pools(true, 1000);
  CHECK(run_one(*pools.both, Op::kPutAbsent, 1, value_of(1)) == Status::kOk);
  wait_behind(pools);
  CHECK(counter(*pools.both, "no_room_far") == 1);
  CHECK(run_one(*pools.both, Op::kTouch, 1) == Status::kNear);
}

TEST(near_far_a_closed_far_pool_leaves_what_is_near) {
  const Pools pools;
  CHECK(run_one(*pools.both, Op::kPutAbsent, 1, value_of(1)) == Status::kOk);
  wait_behind(pools);
  CHECK(pools.far->close(10s));
  CHECK(run_one(*pools.both, Op::kPutAbsent, 2, value_of(2)) == Status::kOk);
  CHECK(run_one(*pools.both, Op::kTouch, 2) == Status::kNear);
  CHECK(run_one(*pools.both, Op::kGet, 3, value_of(3)) == Status::kFault);
}

TEST(near_far_random_calls_of_many_threads) {
  const Pools pools;
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&pools, seed] {
      std::mt19937 draw(seed);
      for (int turn = 0; turn < 150; ++turn) {
        const Op op = static_cast<Op>(draw() % kOpCount);
        std::vector<unsigned> numbers;
        std::vector<Bytes> values;
        for (unsigned i = 0; i < 1 + draw() % 8; ++i) {
          numbers.push_back(static_cast<unsigned>(draw() % 40));
          values.push_back(op == Op::kGet ? Bytes(kNbytes) : value_of(numbers.back()));
        }
        IoExecutor& where = draw() % 8 == 0 ? *pools.far : *pools.both;
        if (draw() % 10 == 0) {
          const auto batch = submit(where, op, numbers, values);
          batch->cancel();
          CHECK(batch->wait_until(Clock::now() + 60s));
          continue;
        }
        const std::vector<Status> results = run(where, op, numbers, values);
        for (std::size_t i = 0; i < numbers.size(); ++i) {
          CHECK(results[i] != Status::kFault && results[i] != Status::kTimedOut);
          if (op == Op::kGet && was_read(results[i])) CHECK(values[i] == value_of(numbers[i]));
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  wait_behind(pools);
}

TEST(near_far_a_prefetch_says_what_it_copied_and_what_was_near) {
  const Pools pools;
  CHECK(run_one(*pools.near, Op::kPut, 0, value_of(0)) == Status::kOk);
  CHECK(run_one(*pools.far, Op::kPut, 0, value_of(0)) == Status::kOk);
  CHECK(run_one(*pools.far, Op::kPut, 1, value_of(1)) == Status::kOk);
  const auto batch = prefetch(*pools.both, 3);
  CHECK(batch->wait_until(Clock::now() + 60s));
  CHECK(batch->results()[0] == Status::kPresent);
  CHECK(batch->results()[1] == Status::kOk);
  CHECK(batch->results()[2] == Status::kMiss);
  CHECK(run_one(*pools.near, Op::kContains, 1) == Status::kOk);
  CHECK(counter(*pools.both, "prefetched") == 1);
}

// A pool that has every value, and holds its gets, also cancelled ones, while it is closed.
struct HeldGets : Backend {
  struct Thread : IoThread {
    explicit Thread(HeldGets& held) : pool(held) {}
    void run(Source& source) override {
      while (std::optional<Item> item = source.next()) {
        if (item->op() == Op::kGet) {
          ++pool.gets;
          while (!pool.open && !source.closing()) {
            pool.cancelled = item->stopped().has_value();
            std::this_thread::sleep_for(1ms);
          }
          const Bytes value = value_of(0);
          std::copy(value.begin(), value.end(), item->buffer().begin());
        }
        item->finish(item->stopped().value_or(Status::kOk));
      }
    }
    HeldGets& pool;
  };
  std::unique_ptr<IoThread> make_io_thread(unsigned) override { return std::make_unique<Thread>(*this); }
  void append_counters(Counters&) const override {}

  std::atomic<bool> open{false}, cancelled{false};
  std::atomic<int> gets{0};
};

TEST(near_far_who_joins_a_copy_that_all_others_gave_up_gets_it) {
  Pools pools;
  HeldGets& far = pools.replace<HeldGets>(pools.far);
  const auto first = prefetch(*pools.both, 1);
  CHECK(eventually([&] { return far.gets == 1; }));
  first->cancel();
  CHECK(eventually([&] { return far.cancelled.load(); }));
  const auto second = prefetch(*pools.both, 1);
  CHECK(eventually([&] { return counter(*pools.near, "contains_misses") == 2; }));
  std::this_thread::sleep_for(50ms);  // it joins; later it would only begin a copy of its own
  far.open = true;
  CHECK(second->wait_until(Clock::now() + 60s) && first->wait_until(Clock::now() + 60s));
  CHECK(second->results()[0] == Status::kOk);
  CHECK(far.gets == 2);
  std::vector<Bytes> read{Bytes(kNbytes)};
  CHECK(run(*pools.near, Op::kGet, {0}, read)[0] == Status::kOk && read[0] == value_of(0));
  CHECK(counter(*pools.both, "far_faults") == 0);
}

TEST(near_far_prefetches_of_many_threads_beside_deletes) {
  const Pools pools;
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&pools, seed] {
      std::mt19937 draw(seed);
      for (int turn = 0; turn < 100; ++turn) {
        const auto number = static_cast<unsigned>(draw() % 40);
        CHECK(run_one(*pools.far, Op::kPut, number, value_of(number)) == Status::kOk);
        if (draw() % 4 == 0) run_one(*pools.both, Op::kDelete, static_cast<unsigned>(draw() % 40));
        const auto batch = prefetch(*pools.both, 40);
        if (draw() % 3 == 0) batch->cancel();
        CHECK(batch->wait_until(Clock::now() + 60s));
        std::vector<Bytes> read{Bytes(kNbytes)};
        if (was_read(run(*pools.both, Op::kGet, {number}, read)[0])) CHECK(read[0] == value_of(number));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(counter(*pools.both, "far_faults") == 0);
}

// A far pool of three shards, which ends a put as the key's shard does: alive, dead, silent until it is closed, refusing
// this key, or without room; holding puts until they are let go, or refusing to be asked for this key.
struct FarShards : Backend {
  enum class Way : std::uint8_t { kTakes, kDead, kSilent, kRefuses, kFull, kHolds, kRefusesTouch };

  struct Thread : IoThread {
    explicit Thread(FarShards& shards) : pool(shards) {}
    void run(Source& source) override {
      std::list<Item> held;
      while (!source.closing()) {
        std::vector<Item> taken;
        while (source.try_take(taken, true)) {
        }
        for (Item& item : taken) {
          if (item.op() != Op::kGet)
            ++(is_put(item.op()) ? pool.tries : pool.asked)[number_of(item.key().text) % 3];
          held.push_back(std::move(item));
        }
        std::erase_if(held, [this](Item& item) { return end(item); });
        std::this_thread::sleep_for(200us);
      }
    }
    bool end(Item& item) const {
      if (const auto stopped = item.stopped()) {
        item.finish(*stopped);
        return true;
      }
      switch (pool.ways[number_of(item.key().text) % 3].load()) {
        case Way::kSilent:
          return false;
        case Way::kDead:
          item.finish(Status::kFault, "dead", Blame::kStore);
          return true;
        case Way::kRefuses:
          if (is_put(item.op())) {
            item.finish(Status::kRefused, "ERR too large");
            return true;
          }
          break;
        case Way::kFull:
          if (is_put(item.op())) {
            item.finish(Status::kNoRoom);
            return true;
          }
          break;
        case Way::kHolds:
          if (is_put(item.op()) && !pool.lets_one_go.exchange(false)) return false;
          break;
        case Way::kRefusesTouch:
          if (item.op() == Op::kTouch) {
            item.finish(Status::kRefused, "NOPERM");
            return true;
          }
          break;
        case Way::kTakes:
          break;
      }
      if (is_put(item.op())) ++pool.puts;
      item.finish(is_put(item.op()) ? Status::kOk : Status::kMiss);
      return true;
    }
    FarShards& pool;
  };
  static unsigned number_of(std::string_view key) {
    const std::size_t begin = key.find(':', key.find(':', key.find(':') + 1) + 1) + 1;
    return static_cast<unsigned>(std::stoul(std::string(key.substr(begin, 16))));
  }
  std::unique_ptr<IoThread> make_io_thread(unsigned) override { return std::make_unique<Thread>(*this); }
  void append_counters(Counters&) const override {}
  std::string shard_of(std::string_view key) const override { return std::to_string(number_of(key) % 3); }

  std::array<std::atomic<Way>, 3> ways{Way::kTakes, Way::kTakes, Way::kTakes};
  std::atomic<unsigned> puts{0};
  std::array<std::atomic<unsigned>, 3> tries{}, asked{};  // puts and other questions that came
  std::atomic<bool> lets_one_go{false};
};

struct BeforeShards : Pools {
  BeforeShards() { shards = &replace<FarShards>(far, 2); }
  void put(unsigned first, unsigned count) const {
    std::vector<unsigned> numbers;
    std::vector<Bytes> values;
    for (unsigned i = first; i < first + count; ++i) {
      numbers.push_back(i);
      values.push_back(value_of(i));
    }
    for (const Status status : run(*both, Op::kPutAbsent, numbers, values)) CHECK(status == Status::kOk);
  }
  void get(unsigned count) const {
    std::vector<unsigned> numbers;
    std::vector<Bytes> values(count, Bytes(kNbytes));
    for (unsigned i = 0; i < count; ++i) numbers.push_back(i);
    for (const Status status : run(*both, Op::kGet, numbers, values)) CHECK(status == Status::kNear);
    for (unsigned i = 0; i < count; ++i) CHECK(values[i] == value_of(i));
  }
  FarShards* shards;
};

TEST(near_far_a_fault_of_near_is_passed_over_and_counted_as_nears) {
  Pools pools;
  for (auto& way : pools.replace<FarShards>(pools.near).ways) way = FarShards::Way::kDead;
  CHECK(run_one(*pools.far, Op::kPut, 1, value_of(1)) == Status::kOk);
  std::vector<Bytes> read{Bytes(kNbytes)};
  CHECK(run(*pools.both, Op::kGet, {1}, read)[0] == Status::kOk && read[0] == value_of(1));
  CHECK(counter(*pools.both, "near_faults") == 1 && counter(*pools.both, "far_faults") == 0);
}

TEST(near_far_no_answer_of_far_about_presence_is_a_miss) {
  const BeforeShards pools;
  for (auto& way : pools.shards->ways) way = FarShards::Way::kDead;
  for (const Op op : {Op::kTouch, Op::kContains}) CHECK(run_one(*pools.both, op, 1) == Status::kMiss);
  CHECK(run_one(*pools.both, Op::kGet, 1, Bytes(kNbytes)) == Status::kFault);
}

TEST(near_far_shards_that_take_nothing_hold_up_no_other) {
  using Way = FarShards::Way;
  for (const Way way : {Way::kDead, Way::kSilent, Way::kRefuses, Way::kFull}) {
    const BeforeShards pools;
    pools.shards->ways[0] = way;
    pools.put(0, 300);
    CHECK(eventually([&] { return pools.shards->puts == 200; }));
    pools.get(300);
    const bool leaves = way == Way::kRefuses || way == Way::kFull;
    CHECK(eventually([&] { return counter(*pools.both, "behind_waiting") == (leaves ? 0U : 100U); }));
    CHECK(counter(*pools.both, way == Way::kFull ? "no_room_far" : "refused_far") == (leaves ? 100U : 0U));
    pools.shards->ways[0] = Way::kTakes;
    if (leaves) continue;
    CHECK(way == Way::kSilent || eventually([&] { return pools.shards->puts == 300; }));
    CHECK(counter(*pools.both, "lost") == 0);
  }
}

TEST(near_far_a_dead_shard_is_asked_after_pauses_that_double_and_no_other_is) {
  const BeforeShards pools;
  pools.shards->ways[0] = FarShards::Way::kDead;
  const Clock::time_point begin = Clock::now();
  pools.put(0, 300);
  CHECK(eventually([&] { return pools.shards->asked[0] >= 4; }));
  CHECK(Clock::now() - begin >= 1500ms);
  CHECK(pools.shards->tries[0] <= 100 && pools.shards->puts == 200);
  CHECK(pools.shards->asked[1] == 0 && pools.shards->asked[2] == 0);
}

TEST(near_far_after_a_pause_one_copy_goes_alone_and_then_all) {
  const BeforeShards pools;
  FarShards& far = *pools.shards;
  far.ways[0] = FarShards::Way::kDead;
  pools.put(0, 300);
  CHECK(eventually([&] { return far.asked[0] >= 2; }));
  const unsigned tried = far.tries[0];
  far.ways[0] = FarShards::Way::kHolds;
  CHECK(eventually([&] { return far.tries[0] > tried; }));
  for (int turn = 0; turn < 20; ++turn) pools.get(300);
  CHECK(far.tries[0] == tried + 1);
  far.lets_one_go = true;
  CHECK(eventually([&] { return far.tries[0] >= tried + 3; }));
  far.ways[0] = FarShards::Way::kTakes;
  wait_behind(pools);
}

TEST(near_far_a_shard_that_takes_its_time_gets_so_many_bytes) {
  constexpr std::size_t kNbytesEach = std::size_t{1} << 20;
  const BeforeShards pools;
  pools.shards->ways[0] = FarShards::Way::kHolds;
  std::vector<unsigned> numbers;
  std::vector<Bytes> values;
  for (unsigned i = 0; i < 12; ++i) {
    numbers.push_back(3 * i);
    values.push_back(value_of(3 * i, kNbytesEach));
  }
  for (const Status status : run(*pools.both, Op::kPutAbsent, numbers, values)) CHECK(status == Status::kOk);
  CHECK(eventually([&] { return pools.shards->tries[0] >= 8; }));
  pools.put(1000, 100);
  pools.get(0);
  CHECK(pools.shards->tries[0] == 8);
  pools.shards->ways[0] = FarShards::Way::kTakes;
  wait_behind(pools);
}

TEST(near_far_a_use_that_is_refused_pauses_nothing) {
  const BeforeShards pools;
  pools.shards->ways[0] = FarShards::Way::kRefusesTouch;
  std::vector<unsigned> numbers{0, 3, 6};
  std::vector<Bytes> values{value_of(0), value_of(3), value_of(6)};
  run(*pools.near, Op::kPut, numbers, values);
  run(*pools.both, Op::kGet, numbers, values);
  CHECK(eventually([&] { return counter(*pools.both, "uses_lost") == 3; }));
  CHECK(run_one(*pools.both, Op::kPut, 9, value_of(9)) == Status::kOk);
  CHECK(eventually([&] { return pools.shards->puts == 1; }));
  CHECK(pools.shards->asked[0] == 3);
}

TEST(near_far_a_value_that_far_refused_is_not_asked_for_at_each_use) {
  const BeforeShards pools;
  pools.shards->ways[0] = FarShards::Way::kRefuses;
  pools.put(0, 1);
  CHECK(eventually([&] { return counter(*pools.both, "refused_far") == 1; }));
  CHECK(run_one(*pools.near, Op::kPut, 3, value_of(3)) == Status::kOk);
  std::vector<Bytes> values(2, Bytes(kNbytes));
  run(*pools.both, Op::kGet, {0, 3}, values);
  CHECK(eventually([&] { return counter(*pools.both, "refused_far") == 2; }));
  CHECK(pools.shards->asked[0] == 1);  // of the other one
}

TEST(near_far_a_question_ends_in_its_own_time_beside_those_that_wait_longer) {
  BeforeShards pools;
  FarShards& near = pools.replace<FarShards>(pools.near);
  for (FarShards* both : {&near, pools.shards}) {
    for (auto& way : both->ways) way = FarShards::Way::kSilent;
  }
  std::vector<std::shared_ptr<Batch>> patient, hasty;
  // As many as near has at a time: the others are taken together.
  for (unsigned i = 0; i < 200; ++i)
    patient.push_back(pools.both->submit(Op::kTouch, {make_key(9000 + i)}, {}, 60s));
  for (unsigned i = 0; i < 64; ++i) {
    patient.push_back(pools.both->submit(Op::kTouch, {make_key(3 * i)}, {}, 60s));
    hasty.push_back(pools.both->submit(Op::kTouch, {make_key(3 * i + 300)}, {}, 5s));
  }
  for (auto& way : near.ways) way = FarShards::Way::kTakes;
  for (const auto& batch : hasty) CHECK(batch->wait_until(Clock::now() + 30s));
  for (auto& way : pools.shards->ways) way = FarShards::Way::kTakes;
  for (const auto& batch : patient) CHECK(batch->wait_until(Clock::now() + 60s));
}

TEST(near_far_pauses_of_a_shard_double_and_begin_anew_once_it_took_a_copy) {
  Shard shard;
  const Clock::time_point now = Clock::now();
  for (const auto pause : {100ms, 200ms, 400ms, 800ms, 1600ms, 3200ms, 5000ms, 5000ms}) {
    shard.failed(now);
    shard.failed(now + 1min);  // what was under way beside it
    CHECK(shard.paused_until == now + pause);
    shard.answered();
    CHECK(shard.goes_alone);
  }
  shard.took();
  CHECK(!shard.goes_alone);
  shard.failed(now);
  CHECK(shard.paused_until == now + 100ms);
}

TEST(near_far_what_is_deleted_waits_no_longer) {
  const BeforeShards pools;
  pools.shards->ways[0] = FarShards::Way::kDead;
  pools.put(0, 1);
  CHECK(eventually([&] { return pools.shards->asked[0] >= 1; }));
  run_one(*pools.both, Op::kDelete, 0);
  pools.shards->ways[0] = FarShards::Way::kTakes;
  wait_behind(pools);
  CHECK(counter(*pools.both, "lost") == 0 && pools.shards->puts == 0);
}

// More of them than are under way near at a time.
TEST(near_far_gets_that_far_does_not_answer_hold_no_place_near) {
  const BeforeShards pools;
  for (auto& way : pools.shards->ways) way = FarShards::Way::kSilent;
  CHECK(run_one(*pools.near, Op::kPut, 0, value_of(0)) == Status::kOk);
  std::vector<std::shared_ptr<Batch>> waiting;
  std::list<std::vector<Bytes>> values;
  for (unsigned i = 0; i < 300; ++i) {
    values.push_back({Bytes(kNbytes)});
    waiting.push_back(submit(*pools.both, Op::kGet, {1000 + i}, values.back()));
  }
  pools.get(1);
  for (auto& way : pools.shards->ways) way = FarShards::Way::kTakes;
  for (const auto& batch : waiting) CHECK(batch->wait_until(Clock::now() + 60s));
}

TEST(near_far_random_shards_beside_near) {
  using Way = FarShards::Way;
  const BeforeShards pools;
  std::mt19937 draw(1);
  unsigned count = 0;
  for (int turn = 0; turn < 30; ++turn) {
    pools.shards->ways[draw() % 3] = static_cast<Way>(draw() % 5);
    if (count < 200) pools.put(count, 20);
    count = std::min(count + 20, 200U);
    pools.get(count);
  }
  for (auto& way : pools.shards->ways) way = Way::kTakes;
  wait_behind(pools);
  CHECK(counter(*pools.both, "near_faults") == 0);
  CHECK(counter(*pools.both, "behind") + counter(*pools.both, "no_room_far") +
            counter(*pools.both, "refused_far") >=
        200 - counter(*pools.both, "lost"));
}

TEST(near_far_a_value_put_with_another_checksum_is_no_record) {
  const Pools pools;
  Bytes value = value_of(1);
  const Key key = make_key(1);
  const auto put =
      pools.far->submit(Op::kPut, {key}, {value}, 60s, std::nullopt, {}, {Found{kNbytes, Seal{{}, 7}}});
  CHECK(put->wait_until(Clock::now() + 60s) && put->results()[0] == Status::kOk);
  CHECK(run_one(*pools.far, Op::kGet, 1, Bytes(kNbytes)) == Status::kMiss);
  CHECK(counter(*pools.far, "damaged_checksum") == 1);
}

TEST(near_far_a_copy_says_who_wrote_its_record) {
  const Pools pools;
  Bytes value = value_of(1);
  const Key key = make_key(1);
  RecordHeader header = make_header(key, kNbytes, {1, 2, 3});
  RecordChecksum checksum;
  checksum.update(value);
  header.checksum = checksum.digest(header);
  const Found known{kNbytes, Seal{header.writer, header.checksum}};
  const auto put = pools.far->submit(Op::kPut, {key}, {value}, 60s, std::nullopt, {}, {known});
  CHECK(put->wait_until(Clock::now() + 60s) && put->results()[0] == Status::kOk);
  CHECK(run_one(*pools.both, Op::kGet, 1, Bytes(kNbytes)) == Status::kOk);
  CHECK(eventually([&] {
    Bytes target(kNbytes);
    const auto got = pools.near->submit(Op::kGet, {key}, {target}, 60s);
    CHECK(got->wait_until(Clock::now() + 60s));
    return got->results()[0] == Status::kOk && got->found(0).seal->writer == header.writer;
  }));
}

TEST(near_far_close_in_the_middle_ends_all) {
  for (int turn = 0; turn < 20; ++turn) {
    Pools pools;
    std::vector<unsigned> numbers;
    std::vector<Bytes> values;
    for (unsigned i = 0; i < 64; ++i) {
      numbers.push_back(i);
      values.push_back(value_of(i, 20'000));
    }
    for (unsigned i = 30; i < 40; ++i) CHECK(run_one(*pools.far, Op::kPut, i, value_of(i)) == Status::kOk);
    const auto ahead = prefetch(*pools.both, 40);
    const auto batch = submit(*pools.both, Op::kPutAbsent, numbers, values);
    std::this_thread::sleep_for(std::chrono::microseconds(turn * 200));
    CHECK(pools.both->close(30s));
    CHECK(batch->done() && ahead->done());
    for (auto& value : values) std::memset(value.data(), 0, value.size());  // nothing reads them any more
  }
}

}  // namespace
}  // namespace kvpool
