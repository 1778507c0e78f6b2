// Lookups: which keys they spell, how far they ask, and what the executor makes of the answers.
#include "store/lookup.h"

#include <condition_variable>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "store/executors.h"

namespace kvpool {
namespace {

using namespace std::chrono_literals;
using test::counter;
using test::eventually;

const std::string kPrefix = "kvpool:t:" + std::string(32, '0') + ":";

// Kept until the program ends: lookups borrow them.
std::string_view kept(std::string hashes) {
  static std::mutex mutex;
  static std::list<std::string> all;
  const std::lock_guard lock(mutex);
  return all.emplace_back(std::move(hashes));
}

std::string packed(std::size_t records, std::size_t hash_nbytes = 8) {
  std::string hashes;
  for (std::size_t i = 0; i < records; ++i) {
    std::string hash(hash_nbytes, '\0');
    for (std::size_t byte = 0; byte < 4; ++byte) hash[byte] = static_cast<char>(i >> (8 * byte) & 255);
    hashes += hash;
  }
  return hashes;
}

LookupGroup group_of(std::size_t records, std::uint16_t group, std::uint32_t ranks,
                     std::uint64_t record_tokens, bool sliding_window = false) {
  return {kept(packed(records)), 8, group, ranks, record_tokens, sliding_window};
}

std::unique_ptr<Lookup> lookup_of(std::vector<LookupGroup> groups) {
  return std::make_unique<Lookup>(kPrefix, std::move(groups));
}

// Answers what it is told to: by (group, record, rank), everything else is there. With `open` false it waits.
struct Pool {
  std::mutex mutex;
  std::condition_variable changed;
  bool open = true;
  std::map<std::string, Status> answers;
  std::vector<std::string> asked;

  void answer(std::uint16_t group, std::size_t record, std::uint16_t rank, Status status) {
    const Key key = Lookup(kPrefix, {group_of(record + 1, group, std::uint32_t{rank} + 1, 1)})
                        .key(record * (std::size_t{rank} + 1) + rank);
    answers[key.text] = status;
  }
  void set_open() {
    const std::lock_guard lock(mutex);
    open = true;
    changed.notify_all();
  }
  std::size_t count_asked() {
    const std::lock_guard lock(mutex);
    return asked.size();
  }
};

class PoolIoThread : public IoThread {
 public:
  explicit PoolIoThread(Pool& pool) : pool_(pool) {}

  void run(Source& source) override {
    while (auto item = source.next()) {
      std::unique_lock lock(pool_.mutex);
      pool_.asked.push_back(item->key().text);
      while (!pool_.open && !item->stopped()) pool_.changed.wait_for(lock, 1ms);
      const auto found = pool_.answers.find(item->key().text);
      const Status status = found == pool_.answers.end() ? Status::kOk : found->second;
      lock.unlock();
      const auto stopped = item->stopped();
      item->finish(stopped.value_or(status), status == Status::kFault ? "planted" : "");
    }
  }

 private:
  Pool& pool_;
};

template <typename IoThreadOfPool>
class BackendOf : public Backend {
 public:
  explicit BackendOf(Pool& pool) : pool_(pool) {}
  std::unique_ptr<IoThread> make_io_thread(unsigned) override {
    return std::make_unique<IoThreadOfPool>(pool_);
  }
  void append_counters(Counters&) const override {}

 private:
  Pool& pool_;
};
using PoolBackend = BackendOf<PoolIoThread>;

std::string results(const Batch& batch) {
  std::string text;
  for (const Status status : batch.results()) text += static_cast<char>('0' + static_cast<int>(status));
  return text;
}

std::string ended(IoExecutor& engine, std::vector<LookupGroup> groups) {
  const auto batch = engine.submit(lookup_of(std::move(groups)), 20s);
  CHECK(batch->wait_until(Clock::now() + 20s));
  return results(*batch);
}

TEST(lookup_spells_the_keys_that_parse_key_reads) {
  for (const std::size_t hash_nbytes : {8U, 20U, 32U, 64U}) {
    std::string hashes = packed(3, hash_nbytes);
    hashes.back() = '\xfe';
    const Lookup lookup(kPrefix, {{hashes, hash_nbytes, 65535, 2, 16, false},
                                  group_of(0, 1, 5, 16),
                                  {hashes, hash_nbytes, 7, 3, 16, true}});
    CHECK(lookup.key_count() == 6 + 9);
    CHECK(lookup.record_count() == 6);
    std::set<std::string> texts;
    for (std::size_t i = 0; i < lookup.key_count(); ++i) {
      const Key key = lookup.key(i);
      const Key parsed = parse_key(key.text);
      CHECK(texts.insert(key.text).second);
      CHECK(key.hash_end == parsed.hash_end);
      CHECK(key.group == parsed.group && key.rank == parsed.rank);
      CHECK(key.fingerprint == parsed.fingerprint && key.hash_prefix == parsed.hash_prefix);
    }
    CHECK(lookup.key(5).rank == 1 && lookup.key(5).group == 65535 && lookup.record_of(5) == 2);
    CHECK(lookup.key(6).rank == 0 && lookup.key(6).group == 7 && lookup.record_of(6) == 3);
    CHECK(lookup.key(5).text.ends_with("fe:65535:1"));
  }
}

TEST(lookup_refuses_what_is_no_lookup) {
  const auto refused = [](std::string prefix, LookupGroup group) {
    try {
      const Lookup lookup(prefix, {group});
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  CHECK(!refused(kPrefix, group_of(2, 0, 1, 16)));
  CHECK(refused("", group_of(2, 0, 1, 16)));
  CHECK(refused("kvpool:t:", group_of(2, 0, 1, 16)));
  CHECK(refused(kPrefix, group_of(2, 0, 0, 16)));
  CHECK(refused(kPrefix, group_of(2, 0, 65'537, 16)));
  CHECK(refused(kPrefix, group_of(2, 0, 1, 0)));
  CHECK(refused(kPrefix, {kept(packed(2)), 7, 0, 1, 16, false}));
  CHECK(refused(kPrefix, {kept(packed(2)), 65, 0, 1, 16, false}));
  CHECK(refused(kPrefix, {kept(packed(2) + "x"), 8, 0, 1, 16, false}));
}

TEST(lookup_asks_up_to_the_first_missing_record_of_full_attention) {
  Lookup lookup(kPrefix, {group_of(100, 0, 2, 16), group_of(50, 1, 2, 32), group_of(100, 2, 2, 16, true)});
  CHECK(lookup.next_wanted(0) == 0);
  lookup.missed(300 + 7);  // of a sliding window: what is behind it may be of use
  CHECK(lookup.next_wanted(60) == 60);
  lookup.missed(2 * 31 + 1);
  CHECK(lookup.next_wanted(2 * 30) == 60);
  CHECK(lookup.next_wanted(2 * 31) == 200);
  CHECK(lookup.next_wanted(200 + 2 * 15) == 300);  // tokens 480 to 511, of which 496 may be used
  CHECK(lookup.next_wanted(300 + 2 * 30 + 1) == 361);
  CHECK(lookup.next_wanted(300 + 2 * 31) == lookup.key_count());
  lookup.missed(2 * 40);
  CHECK(lookup.next_wanted(2 * 30) == 60);
  lookup.give_up();
  CHECK(lookup.next_wanted(0) == lookup.key_count());
}

TEST(lookup_of_an_engine_is_there_when_all_parts_are) {
  Pool pool;
  pool.answer(1, 2, 1, Status::kMiss);
  pool.answer(2, 1, 0, Status::kMiss);
  // Of two threads, one may ask for what follows before the other has its answer.
  IoExecutor engine(std::make_unique<PoolBackend>(pool), 1);
  CHECK(ended(engine, {group_of(4, 0, 3, 16)}) == "1111");
  CHECK(ended(engine, {group_of(4, 1, 1, 16)}) == "1111");
  CHECK(ended(engine, {group_of(4, 1, 2, 16)}) == "1100");
  CHECK(ended(engine, {group_of(4, 2, 2, 16, true)}) == "1011");
  CHECK(ended(engine, {group_of(4, 1, 2, 16), group_of(4, 2, 2, 16, true)}) == "11001000");
  CHECK(ended(engine, {group_of(0, 0, 2, 16)}).empty());
  CHECK(ended(engine, {}).empty());
  CHECK(counter(engine, "queued") == 0);
}

// Takes no puts, as an I/O thread does whose connection for puts is full.
class ReadingIoThread : public IoThread {
 public:
  explicit ReadingIoThread(Pool& pool) : pool_(pool) {}

  void run(Source& source) override {
    std::vector<Item> items;
    while (!source.closing()) {
      if (!source.try_take(items, false)) std::this_thread::sleep_for(1ms);
      for (Item& item : items) {
        const std::lock_guard lock(pool_.mutex);
        pool_.asked.push_back(item.key().text);
        item.finish(Status::kOk);
      }
      items.clear();
    }
  }

 private:
  Pool& pool_;
};

TEST(lookup_has_its_keys_in_a_lane_that_takes_no_puts) {
  Pool pool;
  IoExecutor engine(std::make_unique<BackendOf<ReadingIoThread>>(pool), 1);
  CHECK(ended(engine, {group_of(100, 0, 1, 16)}) == std::string(100, '1'));
  const Lookup lookup(kPrefix, {group_of(100, 0, 1, 16)});
  CHECK(pool.asked.size() == 100);
  for (std::size_t i = 0; i < pool.asked.size(); ++i) CHECK(pool.asked[i] == lookup.key(i).text);
}

TEST(lookup_of_an_engine_ends_with_what_is_missing) {
  Pool pool;
  pool.answer(0, 5, 7, Status::kMiss);
  IoExecutor engine(std::make_unique<PoolBackend>(pool), 1);
  const std::string answer = ended(engine, {group_of(1'000'000, 0, 8, 16)});
  CHECK(answer == "11111" + std::string(1'000'000 - 5, '0'));
  CHECK(pool.count_asked() == 48);
  CHECK(counter(engine, "contains_misses") == 1 && counter(engine, "contains_hits") == 47);
}

TEST(lookup_of_more_keys_than_may_wait_counts_as_one) {
  Pool pool;
  pool.open = false;
  IoExecutor engine(std::make_unique<PoolBackend>(pool), 1);
  const auto long_one = engine.submit(lookup_of({group_of(300'000, 0, 8, 16)}), 20s);
  const auto other = engine.submit(lookup_of({group_of(3, 1, 1, 16)}), 20s);
  CHECK(eventually([&] { return pool.count_asked() == 1; }));
  CHECK(counter(engine, "queued") == 2);
  pool.answer(0, 1000, 0, Status::kMiss);
  pool.set_open();
  CHECK(other->wait_until(Clock::now() + 20s));
  CHECK(!long_one->done() || pool.count_asked() > 1000 * 8);
  CHECK(long_one->wait_until(Clock::now() + 20s));
  CHECK(results(*long_one).find('0') == 1000);
  const std::lock_guard lock(pool.mutex);
  CHECK(pool.asked[256].find(":1:0") != std::string::npos);  // it was the other's turn
}

TEST(lookup_of_an_engine_that_is_stopped_says_so_and_a_fault_outweighs_a_miss) {
  Pool pool;
  pool.open = false;
  IoExecutor engine(std::make_unique<PoolBackend>(pool), 1);
  const auto cancelled = engine.submit(lookup_of({group_of(1000, 0, 8, 16)}), 20s);
  CHECK(eventually([&] { return pool.count_asked() == 1; }));
  cancelled->cancel();
  CHECK(cancelled->wait_until(Clock::now() + 20s));
  CHECK(results(*cancelled) == std::string(1000, '4'));
  const auto late = engine.submit(lookup_of({group_of(1000, 0, 8, 16)}), 20ms);
  CHECK(late->wait_until(Clock::now() + 20s));
  CHECK(results(*late) == std::string(1000, '5'));
  CHECK(counter(engine, "queued") == 0);
  pool.set_open();
  const std::size_t before = pool.count_asked();
  pool.answer(0, 3, 0, Status::kMiss);
  pool.answer(0, 3, 1, Status::kFault);
  CHECK(ended(engine, {group_of(100'000, 0, 1, 16)}) == "111" + std::string(100'000 - 3, '0'));
  const auto sliding_window = engine.submit(lookup_of({group_of(100'000, 0, 8, 16, true)}), 20s);
  CHECK(sliding_window->wait_until(Clock::now() + 20s));
  CHECK(results(*sliding_window).substr(0, 4) == "1113");
  CHECK(sliding_window->error() == "planted");
  CHECK(pool.count_asked() - before == 4 + 26);
}

TEST(lookups_of_many_threads_end_once_each) {
  Pool pool;
  for (std::size_t record = 0; record < 64; record += 5) {
    pool.answer(0, record + 20, static_cast<std::uint16_t>(record % 4), Status::kMiss);
  }
  IoExecutor engine(std::make_unique<PoolBackend>(pool), 4);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&engine, caller] {
      for (int turn = 0; turn < 50; ++turn) {
        const auto batch =
            engine.submit(lookup_of({group_of(64, 0, 4, 16), group_of(32, 1, 4, 32, true)}), 20s);
        if (turn % 5 == caller) batch->cancel();
        CHECK(batch->wait_until(Clock::now() + 20s));
        const std::string answer = results(*batch);
        CHECK(answer.size() == 64 + 32);
        if (answer.find('4') != std::string::npos) continue;
        CHECK(answer.find('0') == 20);
        CHECK(answer.substr(64, 10) == std::string(10, '1'));
      }
    });
  }
  for (auto& caller : callers) caller.join();
  CHECK(counter(engine, "queued") == 0);
}

}  // namespace
}  // namespace kvpool
