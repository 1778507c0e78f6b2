// The executor with a backend made of gates: what a store of any kind can rely on.
// Over 400 lines because the rules of one class are tested side by side.
#include "store/io_executor.h"

#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <random>
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

// What the I/O threads do with an item: it waits behind the gate, in pieces, as an item waits for a socket.
struct Gate {
  std::mutex mutex;
  std::condition_variable changed;
  bool open = false;
  bool moves = false;  // an item makes progress while it waits
  int waiting = 0;
  std::vector<Op> order;

  void set_moves(bool value) {
    const std::lock_guard lock(mutex);
    moves = value;
  }
  void set_open(bool value) {
    const std::lock_guard lock(mutex);
    open = value;
    changed.notify_all();
  }
  int count_waiting() {
    const std::lock_guard lock(mutex);
    return waiting;
  }
};

class GateIoThread : public IoThread {
 public:
  GateIoThread(Gate& gate, std::size_t window) : gate_(gate), window_(window) {}

  // Holds up to `window_` items at once, as a socket I/O thread holds its pipeline.
  void run(Source& source) override {
    std::deque<Item> flying;
    for (;;) {
      while (flying.size() < window_) {
        std::vector<Item> taken;
        if (!flying.empty()) {
          if (!source.try_take(taken, true)) break;
        } else if (auto item = source.next()) {
          taken.push_back(std::move(*item));
        } else {
          return;
        }
        std::move(taken.begin(), taken.end(), std::back_inserter(flying));
      }
      Item item = std::move(flying.front());
      flying.pop_front();
      serve(std::move(item));
    }
  }

 private:
  void serve(Item item) {
    std::unique_lock lock(gate_.mutex);
    ++gate_.waiting;
    while (!gate_.open && !item.stopped()) {
      if (gate_.moves) item.moved(Clock::now());
      gate_.changed.wait_for(lock, 1ms);
    }
    --gate_.waiting;
    gate_.order.push_back(item.op());
    lock.unlock();
    if (item.key().rank == 13) throw std::runtime_error("unlucky");
    if (const auto stopped = item.stopped()) return item.finish(*stopped);
    for (std::byte& b : item.op() == Op::kGet ? item.buffer() : std::span<std::byte>()) b = std::byte{42};
    if (item.key().rank == 14) return item.finish(Status::kFault, "rank 14");
    item.finish(Status::kOk);
  }

  Gate& gate_;
  const std::size_t window_;
};

class GateBackend : public Backend {
 public:
  GateBackend(Gate& gate, std::size_t window) : gate_(gate), window_(window) {}
  std::unique_ptr<IoThread> make_io_thread(unsigned) override {
    return std::make_unique<GateIoThread>(gate_, window_);
  }
  void append_counters(Counters& counters) const override { counters.emplace_back("gates", 1); }

 private:
  Gate& gate_;
  const std::size_t window_;
};

std::unique_ptr<IoExecutor> make_engine(Gate& gate, unsigned threads, std::size_t window = 1) {
  return std::make_unique<IoExecutor>(std::make_unique<GateBackend>(gate, window), threads);
}

std::vector<Key> same_keys(std::size_t n, std::uint16_t rank = 0) {
  std::vector<Key> keys(n, parse_key("kvpool:t:" + std::string(32, '0') + ":" + std::string(16, 'a') +
                                     ":0:" + std::to_string(rank)));
  return keys;
}

std::vector<Batch::Buffer> views(std::vector<std::vector<std::byte>>& buffers) {
  return {buffers.begin(), buffers.end()};
}

bool all(const Batch& batch, Status status) {
  for (const Status s : batch.results()) {
    if (s != status) return false;
  }
  return true;
}

Clock::time_point soon() { return Clock::now() + 20s; }

}  // namespace

TEST(a_batch_goes_on_while_bytes_move_and_ends_when_none_did) {
  Gate gate;
  gate.moves = true;
  const auto engine = make_engine(gate, 1);
  std::vector<std::vector<std::byte>> buffers(3, std::vector<std::byte>(8));
  const auto begun = Clock::now();
  const auto batch = engine->submit(Op::kGet, same_keys(3), views(buffers), 3s, 60s);
  CHECK(!batch->wait_until(begun + 5s));
  CHECK(!batch->given_up());
  gate.set_moves(false);
  CHECK(batch->wait_until(soon()));
  CHECK(batch->given_up());
  CHECK(all(*batch, Status::kTimedOut));
}

TEST(a_batch_ends_at_its_longest_however_many_bytes_move) {
  Gate gate;
  gate.moves = true;
  const auto engine = make_engine(gate, 1);
  std::vector<std::vector<std::byte>> buffers(3, std::vector<std::byte>(8));
  const auto begun = Clock::now();
  const auto batch = engine->submit(Op::kGet, same_keys(3), views(buffers), 60s, 900ms);
  CHECK(batch->wait_until(soon()));
  CHECK(Clock::now() - begun >= 900ms);
  CHECK(all(*batch, Status::kTimedOut));
}

TEST(a_batch_completes) {
  Gate gate;
  gate.open = true;
  const auto engine = make_engine(gate, 2);
  std::vector<std::shared_ptr<Batch>> batches;
  for (int i = 0; i < 5; ++i) batches.push_back(engine->submit(Op::kContains, same_keys(7), {}, 10s));
  for (const auto& batch : batches) {
    CHECK(batch->wait_until(soon()));
    CHECK(all(*batch, Status::kOk) && batch->results().size() == 7 && !batch->error());
  }
  CHECK(counter(*engine, "contains_hits") == 35 && counter(*engine, "gates") == 1);
  CHECK(engine->close(10s));
}

TEST(an_empty_batch_is_done_at_once) {
  Gate gate;
  const auto engine = make_engine(gate, 1);
  const auto batch = engine->submit(Op::kDelete, {}, {}, 10s);
  CHECK(batch->done() && batch->results().empty());
}

TEST(lookups_come_before_loads_before_stores) {
  Gate gate;
  const auto engine = make_engine(gate, 1);
  std::vector<std::vector<std::byte>> buffers(2, std::vector<std::byte>(8));
  const auto blocker = engine->submit(Op::kContains, same_keys(1), {}, 10s);
  CHECK(eventually([&] { return gate.count_waiting() == 1; }));
  const auto put = engine->submit(Op::kPut, same_keys(2), views(buffers), 10s);
  const auto get = engine->submit(Op::kGet, same_keys(2), views(buffers), 10s);
  const auto contains = engine->submit(Op::kContains, same_keys(2), {}, 10s);
  gate.set_open(true);
  CHECK(put->wait_until(soon()) && get->wait_until(soon()) && contains->wait_until(soon()));
  const std::vector<Op> expected = {Op::kContains, Op::kContains, Op::kContains, Op::kGet,
                                    Op::kGet,      Op::kPut,      Op::kPut};
  CHECK(gate.order == expected);
}

TEST(cancel_stops_queued_items_at_once_and_running_ones_soon) {
  Gate gate;
  const auto engine = make_engine(gate, 1);
  const auto running = engine->submit(Op::kContains, same_keys(3), {}, 10s);
  CHECK(eventually([&] { return gate.count_waiting() == 1; }));
  const auto queued = engine->submit(Op::kContains, same_keys(3), {}, 10s);
  queued->cancel();
  CHECK(queued->done() && all(*queued, Status::kCancelled));  // though the only thread is busy
  running->cancel();
  CHECK(running->wait_until(soon()) && all(*running, Status::kCancelled));
  queued->cancel();  // again: nothing happens
  CHECK(counter(*engine, "cancelled") == 6);
  gate.set_open(true);
  const auto after = engine->submit(Op::kContains, same_keys(1), {}, 10s);
  CHECK(after->wait_until(soon()) && all(*after, Status::kOk));
}

TEST(puts_of_one_key_at_once_are_one_transfer) {
  Gate gate;
  const auto engine = make_engine(gate, 4);
  std::vector<std::vector<std::byte>> buffers(16, std::vector<std::byte>(8));
  std::vector<std::shared_ptr<Batch>> puts;
  for (auto& buffer : buffers) puts.push_back(engine->submit(Op::kPut, same_keys(1), {buffer}, 20s));
  CHECK(eventually([&] { return counter(*engine, "queued") == 0 && gate.count_waiting() == 1; }));
  for (const auto& put : puts) CHECK(!put->done());
  // Another length is no such content, and other operations wait for nothing.
  std::vector<std::byte> longer(9);
  const auto other = engine->submit(Op::kPut, same_keys(1), {longer}, 20s);
  const auto contains = engine->submit(Op::kContains, same_keys(1), {}, 20s);
  CHECK(eventually([&] { return gate.count_waiting() == 3; }));
  gate.set_open(true);
  for (const auto& put : puts) CHECK(put->wait_until(soon()) && all(*put, Status::kOk));
  CHECK(other->wait_until(soon()) && contains->wait_until(soon()));
  CHECK(gate.order.size() == 3);
  CHECK(counter(*engine, "puts") == 17 && counter(*engine, "joined_puts") == 15);
  CHECK(counter(*engine, "put_nbytes") == 17);
  // What comes later is a transfer of its own.
  const auto later = engine->submit(Op::kPut, same_keys(1), {buffers[0]}, 20s);
  CHECK(later->wait_until(soon()) && gate.order.size() == 4);
}

TEST(a_put_if_absent_waits_for_any_put_of_its_key_and_no_put_waits_for_it) {
  Gate gate;
  const auto engine = make_engine(gate, 4);
  std::vector<std::vector<std::byte>> buffers(4, std::vector<std::byte>(8));
  const auto first = engine->submit(Op::kPutAbsent, same_keys(1), {buffers[0]}, 20s);
  CHECK(eventually([&] { return gate.count_waiting() == 1; }));
  const auto waits = engine->submit(Op::kPutAbsent, same_keys(1), {buffers[1]}, 20s);
  const auto replaces = engine->submit(Op::kPut, same_keys(1), {buffers[2]}, 20s);
  CHECK(eventually([&] { return counter(*engine, "queued") == 0 && gate.count_waiting() == 2; }));
  gate.set_open(true);
  CHECK(first->wait_until(soon()) && all(*first, Status::kOk));
  CHECK(waits->wait_until(soon()) && all(*waits, Status::kPresent));
  CHECK(replaces->wait_until(soon()) && all(*replaces, Status::kOk));
  CHECK(gate.order.size() == 2);
  CHECK(counter(*engine, "puts") == 2 && counter(*engine, "present_puts") == 1);
  CHECK(counter(*engine, "put_nbytes") == 16 && counter(*engine, "joined_puts") == 1);
  gate.set_open(false);
  const auto put = engine->submit(Op::kPut, same_keys(1), {buffers[2]}, 20s);
  CHECK(eventually([&] { return gate.count_waiting() == 1; }));
  const auto behind = engine->submit(Op::kPutAbsent, same_keys(1), {buffers[3]}, 20s);
  CHECK(eventually([&] { return counter(*engine, "queued") == 0; }));
  gate.set_open(true);
  CHECK(put->wait_until(soon()) && behind->wait_until(soon()) && all(*behind, Status::kPresent));
}

TEST(who_waits_for_a_put_that_is_given_up_takes_its_place) {
  Gate gate;
  const auto engine = make_engine(gate, 2);
  std::vector<std::vector<std::byte>> buffers(4, std::vector<std::byte>(8));
  const auto first = engine->submit(Op::kPut, same_keys(1), {buffers[0]}, 20s);
  CHECK(eventually([&] { return gate.count_waiting() == 1; }));
  const auto second = engine->submit(Op::kPut, same_keys(1), {buffers[1]}, 20s);
  const auto given_up = engine->submit(Op::kPut, same_keys(1), {buffers[2]}, 20s);
  const auto late = engine->submit(Op::kPut, same_keys(1), {buffers[3]}, 50ms);
  CHECK(eventually([&] { return counter(*engine, "queued") == 0; }));
  // Those that wait are ended without the one that they wait for.
  given_up->cancel();
  CHECK(given_up->done() && all(*given_up, Status::kCancelled));
  CHECK(late->wait_until(soon()) && all(*late, Status::kTimedOut));
  first->cancel();
  CHECK(first->wait_until(soon()) && all(*first, Status::kCancelled));
  CHECK(!second->done());
  gate.set_open(true);
  CHECK(second->wait_until(soon()) && all(*second, Status::kOk));
  CHECK(counter(*engine, "puts") == 1 && gate.order.size() == 2);
}

TEST(who_waits_for_a_put_that_fails_hears_why) {
  Gate gate;
  const auto engine = make_engine(gate, 2);
  std::vector<std::vector<std::byte>> buffers(2, std::vector<std::byte>(8));
  const auto first = engine->submit(Op::kPut, same_keys(1, 14), {buffers[0]}, 20s);
  const auto second = engine->submit(Op::kPut, same_keys(1, 14), {buffers[1]}, 20s);
  CHECK(eventually([&] { return counter(*engine, "queued") == 0; }));
  gate.set_open(true);
  for (const auto& put : {first, second}) {
    CHECK(put->wait_until(soon()) && all(*put, Status::kFault));
    CHECK(put->error() == "rank 14");
  }
  CHECK(gate.order.size() == 1);
  // Closing ends those that wait, too.
  gate.set_open(false);
  const auto third = engine->submit(Op::kPut, same_keys(1), {buffers[0]}, 20s);
  const auto fourth = engine->submit(Op::kPut, same_keys(1), {buffers[1]}, 20s);
  CHECK(eventually([&] { return counter(*engine, "queued") == 0; }));
  CHECK(engine->close(10s));
  CHECK(third->done() && fourth->done() && all(*fourth, Status::kCancelled));
}

TEST(the_deadline_completes_queued_batches_though_every_thread_is_busy) {
  Gate gate;
  const auto engine = make_engine(gate, 1);
  const auto busy = engine->submit(Op::kContains, same_keys(1), {}, 30s);
  CHECK(eventually([&] { return gate.count_waiting() == 1; }));
  const auto begin = Clock::now();
  const auto later = engine->submit(Op::kContains, same_keys(1), {}, 100ms);
  const auto sooner = engine->submit(Op::kContains, same_keys(1000), {}, 20ms);
  CHECK(sooner->wait_until(soon()) && all(*sooner, Status::kTimedOut));
  CHECK(!busy->done());
  CHECK(later->wait_until(soon()) && all(*later, Status::kTimedOut));
  CHECK(Clock::now() - begin >= 100ms);
  CHECK(!busy->done());
  gate.set_open(true);
  CHECK(busy->wait_until(soon()) && all(*busy, Status::kOk));
}

TEST(the_deadline_stops_a_running_item) {
  Gate gate;
  const auto engine = make_engine(gate, 2, 3);
  const auto batch = engine->submit(Op::kContains, same_keys(20), {}, 30ms);
  CHECK(batch->wait_until(soon()) && all(*batch, Status::kTimedOut));
  CHECK(counter(*engine, "timed_out") == 20);
}

TEST(a_full_queue_is_an_answer) {
  Gate gate;
  const auto engine = make_engine(gate, 1);
  const auto running = engine->submit(Op::kContains, same_keys(1), {}, 60s);
  CHECK(eventually([&] { return gate.count_waiting() == 1; }));
  std::vector<std::shared_ptr<Batch>> batches;
  for (int i = 0; i < 4; ++i)
    batches.push_back(engine->submit(Op::kContains, same_keys(kMaxQueuedItems / 4), {}, 60s));
  CHECK_THROWS(std::runtime_error, engine->submit(Op::kContains, same_keys(1), {}, 60s));
  batches[2]->cancel();  // takes its items out of the queue
  const auto fits = engine->submit(Op::kContains, same_keys(kMaxQueuedItems / 4), {}, 60s);
  CHECK_THROWS(std::runtime_error, engine->submit(Op::kContains, same_keys(1), {}, 60s));
  CHECK(engine->close(20s));
  CHECK(fits->done() && running->done());
}

TEST(a_fault_has_words_and_the_first_one_stays) {
  Gate gate;
  gate.open = true;
  const auto engine = make_engine(gate, 1);
  const auto batch = engine->submit(Op::kContains, same_keys(3, 14), {}, 10s);
  CHECK(batch->wait_until(soon()) && all(*batch, Status::kFault) && batch->error() == "rank 14");
}

TEST(an_exception_in_a_lane_is_a_fault_of_its_items_and_no_more) {
  Gate gate;
  gate.open = true;
  const auto engine = make_engine(gate, 2, 4);
  const auto batch = engine->submit(Op::kContains, same_keys(10, 13), {}, 20s);
  CHECK(batch->wait_until(soon()) && all(*batch, Status::kFault) && batch->error());
  const auto after = engine->submit(Op::kContains, same_keys(10), {}, 20s);
  CHECK(after->wait_until(soon()) && all(*after, Status::kOk));
}

TEST(close_cancels_what_is_in_flight) {
  Gate gate;
  auto engine = make_engine(gate, 3, 2);
  std::vector<std::vector<std::byte>> buffers(50, std::vector<std::byte>(64));
  const auto get = engine->submit(Op::kGet, same_keys(50), views(buffers), 60s);
  CHECK(eventually([&] { return gate.count_waiting() == 3; }));
  CHECK(engine->close(20s));
  CHECK(engine->close(0s));  // idempotent
  CHECK(get->done() && all(*get, Status::kCancelled));
  CHECK_THROWS(std::runtime_error, engine->submit(Op::kContains, same_keys(1), {}, 1s));
  CHECK(counter(*engine, "cancelled") == 50);
  engine.reset();
  CHECK(get->done());  // a batch outlives its engine
}

namespace {

// Deaf, as a thread in a hung file system.
class StuckIoThread : public IoThread {
 public:
  StuckIoThread(std::shared_ptr<Gate> gate, std::shared_ptr<std::atomic<bool>> gone)
      : gate_(std::move(gate)), gone_(std::move(gone)) {}
  ~StuckIoThread() override { *gone_ = true; }
  void run(Source& source) override {
    while (auto item = source.next()) {
      std::unique_lock lock(gate_->mutex);
      ++gate_->waiting;
      gate_->changed.wait(lock, [this] { return gate_->open; });
      lock.unlock();
      item->buffer()[0] = std::byte{1};
      item->finish(Status::kOk);
    }
  }

 private:
  std::shared_ptr<Gate> gate_;
  std::shared_ptr<std::atomic<bool>> gone_;
};

class StuckBackend : public Backend {
 public:
  std::unique_ptr<IoThread> make_io_thread(unsigned) override {
    return std::make_unique<StuckIoThread>(gate, gone);
  }
  void append_counters(Counters&) const override {}

  const std::shared_ptr<Gate> gate = std::make_shared<Gate>();
  const std::shared_ptr<std::atomic<bool>> gone = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace

TEST(close_says_when_a_thread_is_stuck) {
  auto backend = std::make_unique<StuckBackend>();
  const auto gate = backend->gate;
  const auto engine = std::make_unique<IoExecutor>(std::move(backend), 1);
  std::vector<std::vector<std::byte>> buffers(2, std::vector<std::byte>(64));
  const auto batch = engine->submit(Op::kGet, same_keys(2), views(buffers), 60s);
  CHECK(eventually([&] { return gate->count_waiting() == 1; }));
  CHECK(!engine->close(20ms));
  CHECK(!batch->done());  // its buffer is still in foreign hands
  gate->set_open(true);
  CHECK(engine->close(20s));
  CHECK(batch->done());
  CHECK(batch->results()[0] == Status::kOk && batch->results()[1] == Status::kCancelled);
}

TEST(an_engine_that_goes_while_a_thread_is_stuck_leaves_it_all_it_needs) {
  auto backend = std::make_unique<StuckBackend>();
  const auto gate = backend->gate;
  const auto gone = backend->gone;
  auto engine = std::make_unique<IoExecutor>(std::move(backend), 1);
  std::vector<std::vector<std::byte>> buffers(1, std::vector<std::byte>(64));
  auto batch = engine->submit(Op::kGet, same_keys(1), views(buffers), 60s);
  CHECK(eventually([&] { return gate->count_waiting() == 1; }));
  engine.reset();  // waits for its own patience, then lets go
  CHECK(!batch->done() && !*gone);
  gate->set_open(true);
  CHECK(batch->wait_until(soon()) && buffers[0][0] == std::byte{1});
  batch.reset();
  CHECK(eventually([&] { return gone->load(); }));
}

TEST(many_submitters_cancels_and_deadlines_at_random) {
  Gate gate;
  gate.open = true;
  const auto engine = make_engine(gate, 4, 3);
  std::atomic<std::uint64_t> items{0};
  std::vector<std::thread> submitters;
  for (unsigned t = 0; t < 6; ++t) {
    submitters.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int i = 0; i < 300; ++i) {
        const std::size_t n = random() % 40;
        std::vector<std::vector<std::byte>> buffers(n, std::vector<std::byte>(256));
        const auto op = static_cast<Op>(random() % kOpCount);
        const auto batch =
            engine->submit(op, same_keys(n), moves_bytes(op) ? views(buffers) : std::vector<Batch::Buffer>(),
                           std::chrono::microseconds(1 + random() % 3000));
        items += n;
        if (random() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
        if (random() % 2 == 0) batch->cancel();
        if (random() % 5 == 0) gate.set_open(random() % 3 != 0);
        CHECK(batch->wait_until(soon()));
        // The buffers are ours again: TSan would see an I/O thread that still writes.
        for (auto& buffer : buffers) buffer[0] = buffer[255] = std::byte{7};
        for (const Status s : batch->results()) {
          const bool is_put_elsewhere = s == Status::kPresent && op == Op::kPutAbsent;
          CHECK(s == Status::kOk || s == Status::kCancelled || s == Status::kTimedOut || is_put_elsewhere);
        }
      }
    });
  }
  for (auto& submitter : submitters) submitter.join();
  const auto of = [&](const char* name) { return counter(*engine, name); };
  CHECK(of("puts") + of("present_puts") + of("get_hits") + of("contains_hits") + of("deletes") +
            of("expires") + of("cancelled") + of("timed_out") ==
        items);
  CHECK(engine->close(20s));
}

TEST(close_races_with_submitters) {
  for (int round = 0; round < 20; ++round) {
    Gate gate;
    gate.open = round % 2 == 0;
    const auto engine = make_engine(gate, 2, 2);
    std::vector<std::thread> submitters;
    for (int t = 0; t < 3; ++t) {
      submitters.emplace_back([&] {
        try {
          for (;;) CHECK(engine->submit(Op::kContains, same_keys(3), {}, 5ms)->wait_until(soon()));
        } catch (const std::runtime_error&) {
        }
      });
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100 * round));
    CHECK(engine->close(20s));
    for (auto& submitter : submitters) submitter.join();
  }
}

#if !defined(__SANITIZE_THREAD__)  // TSan cannot follow a fork of a program with threads
TEST(a_forked_child_cannot_use_the_engine_but_can_exit) {
  Gate gate;
  auto engine = make_engine(gate, 2);
  const auto batch = engine->submit(Op::kContains, same_keys(1), {}, 60s);
  const pid_t child = fork();
  if (child == 0) {
    int code = 0;
    try {
      engine->submit(Op::kContains, same_keys(1), {}, 1s);
      code = 1;
    } catch (const std::runtime_error&) {
    }
    if (!engine->close(1s)) code = 2;
    engine.reset();
    _exit(code);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  gate.set_open(true);
  CHECK(batch->wait_until(soon()));
}
#endif

}  // namespace kvpool
