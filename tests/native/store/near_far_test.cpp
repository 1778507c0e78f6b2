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

bool is_found(Status status) { return status == Status::kOk || status == Status::kNear; }

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
          if (op == Op::kGet && is_found(results[i])) CHECK(values[i] == value_of(numbers[i]));
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
  auto backend = std::make_unique<HeldGets>();
  HeldGets& far = *backend;
  pools.far = std::make_shared<IoExecutor>(std::move(backend), 1);
  pools.both = std::make_unique<IoExecutor>(std::make_unique<NearFarBackend>(pools.near, pools.far, true), 1);
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
        if (is_found(run(*pools.both, Op::kGet, {number}, read)[0])) CHECK(read[0] == value_of(number));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(counter(*pools.both, "far_faults") == 0);
}

// A far pool of three shards, which ends a put as the key's shard does: alive, dead, silent until it is closed, refusing
// this key, or without room.
struct Shards : Backend {
  enum class Way : std::uint8_t { kTakes, kDead, kSilent, kRefuses, kFull };

  struct Thread : IoThread {
    explicit Thread(Shards& shards) : pool(shards) {}
    void run(Source& source) override {
      std::list<Item> held;
      while (!source.closing()) {
        std::vector<Item> taken;
        while (source.try_take(taken, true)) {
        }
        for (Item& item : taken) held.push_back(std::move(item));
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
        case Way::kTakes:
          break;
      }
      if (is_put(item.op())) ++pool.puts;
      item.finish(is_put(item.op()) ? Status::kOk : Status::kMiss);
      return true;
    }
    Shards& pool;
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
};

struct BeforeShards : Pools {
  BeforeShards() {
    auto backend = std::make_unique<Shards>();
    shards = backend.get();
    far = std::make_shared<IoExecutor>(std::move(backend), 2);
    both = std::make_unique<IoExecutor>(std::make_unique<NearFarBackend>(near, far, true), 1);
  }
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
  Shards* shards;
};

TEST(near_far_shards_that_take_nothing_hold_up_no_other) {
  using Way = Shards::Way;
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

TEST(near_far_random_shards_beside_near) {
  using Way = Shards::Way;
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
  const auto put = pools.far->submit(Op::kPut, {key}, {value}, 60s, std::nullopt, {}, {Found{kNbytes, 7}});
  CHECK(put->wait_until(Clock::now() + 60s) && put->results()[0] == Status::kOk);
  CHECK(run_one(*pools.far, Op::kGet, 1, Bytes(kNbytes)) == Status::kMiss);
  CHECK(counter(*pools.far, "damaged_checksum") == 1);
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
