#include "engine.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <exception>
#include <iterator>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <unordered_map>

namespace kvpool {
namespace {

constexpr std::size_t kQueueCount = 3;
constexpr Clock::duration kDestructorTimeout = std::chrono::seconds(5);
constexpr const char* kForked = "the engine was made before fork(): make one in this process";
// So many keys of a long lookup, then it is another batch's turn.
constexpr std::size_t kTurnKeys = 256;
constexpr Clock::duration kPauseAfterException = std::chrono::milliseconds(10);

// Lookups are cheap and somebody waits for them; loads have a request waiting; stores have nobody.
std::size_t queue_of(Op op) {
  switch (op) {
    case Op::kContains:
    case Op::kTouch:
    case Op::kDelete:
      return 0;
    case Op::kGet:
      return 1;
    case Op::kPut:
    case Op::kPutAbsent:
      return 2;
  }
  return 2;
}

// Signals of the process are for the threads of the caller (Python runs its handlers in the main thread).
class BlockSignals {
 public:
  BlockSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  BlockSignals(const BlockSignals&) = delete;
  BlockSignals& operator=(const BlockSignals&) = delete;
  ~BlockSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

struct Core {
  explicit Core(std::unique_ptr<Backend> backend_) : backend(std::move(backend_)), pid(getpid()) {}

  const std::unique_ptr<Backend> backend;
  const pid_t pid;
  std::vector<std::unique_ptr<Lane>> lanes;  // fixed from before the threads start until after they ended

  mutable std::mutex mutex;
  std::condition_variable work_arrived;
  std::condition_variable deadlines_changed;
  std::condition_variable thread_ended;
  std::array<std::list<std::shared_ptr<Batch>>, kQueueCount> queues;
  std::size_t queued_items = 0;
  // One item of a batch that is in nobody's hands, but for its batch's `waiting_`.
  struct Waiter {
    std::shared_ptr<Batch> batch;
    std::size_t index;
  };
  // A put in the hands of a lane, and those of the same key and length that get its result.
  struct Writing {
    const Batch* batch;
    std::size_t index;
    std::vector<Waiter> waiters;
  };
  std::unordered_map<std::string_view, Writing> writing;  // by key, whose text the batch of the put holds
  std::deque<Waiter> bereft;                              // the put that they waited for was given up
  // Every batch that is not done, by deadline; `expired` once the deadline has been acted on.
  std::map<std::pair<Clock::time_point, std::uint64_t>, std::shared_ptr<Batch>> deadlines;
  std::map<std::uint64_t, std::shared_ptr<Batch>> expired;
  std::uint64_t last_sequence = 0;
  unsigned live_threads = 0;
  std::vector<std::thread> threads;

  std::atomic<bool> closing{false};
  std::array<std::array<std::atomic<std::uint64_t>, kStatusCount>, kOpCount> counts{};
  std::array<std::atomic<std::uint64_t>, kOpCount> ok_nbytes{};
  std::atomic<std::uint64_t> joined_puts{0};

  using Lock = std::unique_lock<std::mutex>;

  void count_given_up(const Batch& batch, std::size_t items, Status status) {
    counts[static_cast<std::size_t>(batch.op_)][static_cast<std::size_t>(status)].fetch_add(
        items, std::memory_order_relaxed);
  }

  void count(const Batch& batch, std::size_t index, Status status) {
    const auto op = static_cast<std::size_t>(batch.op_);
    counts[op][static_cast<std::size_t>(status)].fetch_add(1, std::memory_order_relaxed);
    if (status == Status::kOk && !batch.buffers_.empty()) {
      ok_nbytes[op].fetch_add(batch.buffers_[index].size(), std::memory_order_relaxed);
    }
  }

  // Under the lock.
  void complete(Batch& batch) {
    batch.done_.store(true, std::memory_order_release);
    batch.done_changed_.notify_all();
    // The caller holds a reference of its own.
    deadlines.erase({batch.deadline_, batch.sequence_});
    expired.erase(batch.sequence_);
  }

  void leave_queue(Batch& batch) {
    if (!batch.queued_) return;
    batch.queued_ = false;
    queues[queue_of(batch.op_)].erase(batch.place_);
    if (batch.lookup_) --queued_items;
  }

  // Under the lock: ends what of a lookup no lane has taken.
  void pass_over(Batch& batch, std::size_t until, Status status) {
    const std::size_t end = batch.lookup_->record_of(until);
    for (std::size_t record = batch.lookup_->record_of(batch.next_); record < end; ++record) {
      batch.set_record(record, status);
    }
    batch.next_ = until;
  }

  // Under the lock: what of a lookup is not worth asking any more is not there.
  void skip_unwanted(Batch& batch) {
    const std::size_t wanted = batch.lookup_->next_wanted(batch.next_);
    const std::size_t skipped = wanted - batch.next_;
    if (skipped == 0) return;
    pass_over(batch, wanted, Status::kMiss);
    if (wanted == batch.item_count()) leave_queue(batch);
    if (batch.unfinished_.fetch_sub(skipped, std::memory_order_acq_rel) == skipped) complete(batch);
  }

  // Under the lock: gives up what no lane has taken, and tells the lanes to give up the rest.
  void stop(const std::shared_ptr<Batch>& batch, Status status) {
    if (batch->done()) return;
    Status expected = Status::kOk;
    if (!batch->stop_.compare_exchange_strong(expected, status)) return;
    const std::size_t untaken = batch->item_count() - batch->next_;
    const std::size_t given_up = untaken + batch->waiting_.size();
    leave_queue(*batch);
    if (batch->lookup_) {
      pass_over(*batch, batch->item_count(), status);
    } else {
      for (; batch->next_ < batch->keys_.size(); ++batch->next_) batch->results_[batch->next_] = status;
      queued_items -= untaken;
    }
    for (const std::size_t index : batch->waiting_) batch->results_[index] = status;
    count_given_up(*batch, given_up, status);
    batch->waiting_.clear();
    if (given_up != 0 && batch->unfinished_.fetch_sub(given_up, std::memory_order_acq_rel) == given_up) {
      complete(*batch);
    } else {
      for (const auto& lane : lanes) lane->wake();
    }
  }

  // Under the lock.
  std::optional<Item> take(bool puts_too = true) {
    for (auto& queue : queues) {
      if (&queue == &queues[queue_of(Op::kPut)]) {
        if (!puts_too) break;
        if (auto item = take_bereft()) return item;
      }
      while (!queue.empty()) {
        const std::shared_ptr<Batch> batch = queue.front();
        if (Clock::now() >= batch->deadline_) {
          stop(batch, Status::kTimedOut);
          continue;
        }
        if (batch->lookup_) {
          skip_unwanted(*batch);
          if (!batch->queued_) continue;
        } else {
          --queued_items;
        }
        const std::size_t index = batch->next_++;
        if (batch->next_ == batch->item_count()) {
          leave_queue(*batch);
        } else if (batch->lookup_ && batch->next_ % kTurnKeys == 0) {
          queue.splice(queue.end(), queue, batch->place_);
        }
        if (is_put(batch->op_) && joins(batch, index)) continue;
        return std::optional<Item>(std::in_place, batch, index);
      }
    }
    return std::nullopt;
  }

  // Under the lock: whether this put waits for one that is under way. If not, others will wait for it.
  bool joins(const std::shared_ptr<Batch>& batch, std::size_t index) {
    const auto [place, first] =
        writing.try_emplace(batch->keys_[index].text, Writing{batch.get(), index, {}});
    if (first) return false;
    Writing& other = place->second;
    // Of another length it cannot be the same content: whoever is wrong, this is not to be answered for it.
    if (other.batch->buffers_[other.index].size() != batch->buffers_[index].size()) return false;
    // What is there has to be replaced, which the other one may not do.
    if (batch->op_ == Op::kPut && other.batch->op_ == Op::kPutAbsent) return false;
    other.waiters.push_back({batch, index});
    batch->waiting_.insert(index);
    return true;
  }

  // Under the lock.
  std::optional<Item> take_bereft() {
    while (!bereft.empty()) {
      const Waiter waiter = std::move(bereft.front());
      bereft.pop_front();
      // The batch was stopped, and this item with it.
      if (waiter.batch->waiting_.erase(waiter.index) == 0) continue;
      if (joins(waiter.batch, waiter.index)) continue;
      return std::optional<Item>(std::in_place, waiter.batch, waiter.index);
    }
    return std::nullopt;
  }

  // A put has ended: so have those that waited for it, unless it was given up.
  void end_waiters(const Batch& batch, std::size_t index, Status status, const std::string& error) {
    const Lock lock(mutex);
    const auto found = writing.find(batch.keys_[index].text);
    if (found == writing.end() || found->second.batch != &batch || found->second.index != index) return;
    std::vector<Waiter> waiters = std::move(found->second.waiters);
    writing.erase(found);
    if (waiters.empty()) return;
    if (status == Status::kCancelled || status == Status::kTimedOut) {
      std::move(waiters.begin(), waiters.end(), std::back_inserter(bereft));
      work_arrived.notify_all();
      for (const auto& lane : lanes) lane->wake();
      return;
    }
    for (const Waiter& waiter : waiters) {
      if (waiter.batch->waiting_.erase(waiter.index) == 0) continue;
      const bool is_present = status == Status::kOk && waiter.batch->op_ == Op::kPutAbsent;
      const Status result = is_present ? Status::kPresent : status;
      waiter.batch->results_[waiter.index] = result;
      count_given_up(*waiter.batch, 1, result);
      joined_puts.fetch_add(1, std::memory_order_relaxed);
      if (!error.empty() && !waiter.batch->error_) waiter.batch->error_ = error;
      if (waiter.batch->unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) complete(*waiter.batch);
    }
  }

  void finish(Batch& batch, std::size_t index, Status status, std::string error) {
    count(batch, index, status);
    if (batch.lookup_) {
      batch.set_record(batch.lookup_->record_of(index), status);
      if (status == Status::kMiss) batch.lookup_->missed(index);
      if (status != Status::kMiss && status != Status::kOk) batch.lookup_->give_up();
    } else {
      batch.results_[index] = status;
    }
    if (is_put(batch.op_)) end_waiters(batch, index, status, error);
    if (!error.empty()) {
      const Lock lock(mutex);
      if (!batch.error_) batch.error_ = std::move(error);
    }
    if (batch.unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      const Lock lock(mutex);
      complete(batch);
    }
  }

  void run_lane(Lane& lane) {
    Source source(*this);
    while (!closing.load()) {
      try {
        lane.run(source);
      } catch (...) {
        // The items it held were finished as faults by their destructors. What throws here is an allocation:
        // give it a moment rather than spin.
        std::this_thread::sleep_for(kPauseAfterException);
      }
    }
  }

  void run_deadlines() {
    Lock lock(mutex);
    while (!closing.load()) {
      if (deadlines.empty()) {
        deadlines_changed.wait(lock);
        continue;
      }
      const auto first = deadlines.begin();
      const Clock::time_point deadline = first->first.first;
      if (Clock::now() < deadline) {
        deadlines_changed.wait_until(lock, deadline);
        continue;
      }
      const std::shared_ptr<Batch> batch = first->second;
      expired.emplace(batch->sequence_, batch);
      deadlines.erase(first);
      stop(batch, Status::kTimedOut);
    }
  }

  void end_thread() {
    const Lock lock(mutex);
    --live_threads;
    thread_ended.notify_all();
  }
};

Batch::Batch(Op op, std::vector<Key> keys, std::vector<Buffer> buffers, Clock::time_point deadline)
    : op_(op),
      keys_(std::move(keys)),
      buffers_(std::move(buffers)),
      deadline_(deadline),
      results_(keys_.size(), Status::kFault),
      unfinished_(keys_.size()) {}

// A lookup touches what it finds: the fleet uses it.
Batch::Batch(std::unique_ptr<Lookup> lookup, Clock::time_point deadline)
    : op_(Op::kTouch),
      lookup_(std::move(lookup)),
      deadline_(deadline),
      results_(lookup_->record_count(), Status::kOk),
      unfinished_(lookup_->key_count()) {}

// Parts of one record end in several threads: what is worse stays.
void Batch::set_record(std::size_t record, Status status) {
  if (status == Status::kOk) return;
  const std::atomic_ref<Status> result(results_[record]);
  Status known = result.load(std::memory_order_relaxed);
  while (known == Status::kOk || (known == Status::kMiss && status != Status::kMiss)) {
    if (result.compare_exchange_weak(known, status, std::memory_order_relaxed)) return;
  }
}

bool Batch::wait_until(Clock::time_point until) {
  if (core_->pid != getpid()) throw std::runtime_error(kForked);
  Core::Lock lock(core_->mutex);
  return done_changed_.wait_until(lock, until, [this] { return done(); });
}

void Batch::cancel() {
  if (done() || core_->pid != getpid()) return;
  const std::shared_ptr<Core> core = core_;
  const Core::Lock lock(core->mutex);
  // Somebody calls this through a reference of their own; the queue's may go away inside stop().
  const auto found = core->deadlines.find({deadline_, sequence_});
  if (found != core->deadlines.end()) {
    const std::shared_ptr<Batch> self = found->second;
    core->stop(self, Status::kCancelled);
  }
}

Item::~Item() {
  if (batch_) finish(Status::kFault, "the store gave up in the middle of an operation");
}

void Item::spell() {
  if (batch_->lookup_) spelled_ = std::make_unique<const Key>(batch_->lookup_->key(index_));
}

std::optional<Status> Item::stopped() const {
  const Status stop = batch_->stop_.load(std::memory_order_relaxed);
  if (stop != Status::kOk) return stop;
  if (Clock::now() >= batch_->deadline_) return Status::kTimedOut;
  return std::nullopt;
}

void Item::finish(Status status, std::string error) {
  const std::shared_ptr<Batch> batch = std::move(batch_);
  const std::shared_ptr<Core> core = batch->core_;
  core->finish(*batch, index_, status, std::move(error));
}

std::optional<Item> Source::next() {
  Core::Lock lock(core_.mutex);
  for (;;) {
    if (core_.closing.load()) return std::nullopt;
    if (auto item = core_.take()) {
      lock.unlock();
      item->spell();
      return item;
    }
    core_.work_arrived.wait(lock);
  }
}

std::optional<Item> Source::try_next() {
  Core::Lock lock(core_.mutex);
  if (core_.closing.load()) return std::nullopt;
  auto item = core_.take();
  lock.unlock();
  if (item) item->spell();
  return item;
}

std::optional<Item> Source::try_next_read() {
  const Core::Lock lock(core_.mutex);
  if (core_.closing.load()) return std::nullopt;
  return core_.take(false);
}

bool Source::closing() const { return core_.closing.load(); }

Engine::Engine(std::unique_ptr<Backend> backend, unsigned threads)
    : core_(std::make_shared<Core>(std::move(backend))) {
  for (unsigned i = 0; i < threads; ++i) core_->lanes.push_back(core_->backend->make_lane(i));

  const BlockSignals blocked;
  const auto start = [this](const std::string& name, auto body) {
    {
      const Core::Lock lock(core_->mutex);
      ++core_->live_threads;
    }
    try {
      core_->threads.emplace_back([core = core_, name, body] {
        pthread_setname_np(pthread_self(), name.c_str());
        body(*core);
        core->end_thread();
      });
    } catch (...) {
      core_->end_thread();
      throw;
    }
  };
  try {
    for (unsigned i = 0; i < threads; ++i) {
      start("kvpool-io-" + std::to_string(i), [i](Core& core) { core.run_lane(*core.lanes[i]); });
    }
    start("kvpool-timer", [](Core& core) { core.run_deadlines(); });
  } catch (...) {
    close(kDestructorTimeout);
    throw;
  }
}

Engine::~Engine() {
  if (forked()) {
    // std::thread's destructor would end the process, and a lock may be held for ever: leave it all to the exit.
    new std::shared_ptr<Core>(std::move(core_));
    return;
  }
  if (close(kDestructorTimeout)) return;
  const Core::Lock lock(core_->mutex);
  for (auto& thread : core_->threads) thread.detach();
  core_->threads.clear();
}

bool Engine::forked() const { return getpid() != core_->pid; }

std::shared_ptr<Batch> Engine::submit(Op op, std::vector<Key> keys, std::vector<Batch::Buffer> buffers,
                                      Clock::duration timeout) {
  return submit(std::make_shared<Batch>(op, std::move(keys), std::move(buffers), Clock::now() + timeout));
}

std::shared_ptr<Batch> Engine::submit(std::unique_ptr<Lookup> lookup, Clock::duration timeout) {
  return submit(std::make_shared<Batch>(std::move(lookup), Clock::now() + timeout));
}

std::shared_ptr<Batch> Engine::submit(std::shared_ptr<Batch> batch) {
  if (forked()) throw std::runtime_error(kForked);
  const std::size_t items = batch->item_count();
  const std::size_t waits = batch->lookup_ ? 1 : items;
  batch->core_ = core_;
  const Core::Lock lock(core_->mutex);
  if (core_->closing.load()) throw std::runtime_error("the engine is closed");
  if (waits > kMaxQueuedItems - core_->queued_items) {
    throw std::runtime_error("queue full: " + std::to_string(core_->queued_items) +
                             " items are waiting, at most " + std::to_string(kMaxQueuedItems) + " may");
  }
  batch->sequence_ = ++core_->last_sequence;
  if (items == 0) {
    core_->complete(*batch);
    return batch;
  }
  auto& queue = core_->queues[queue_of(batch->op_)];
  batch->place_ = queue.insert(queue.end(), batch);
  batch->queued_ = true;
  core_->queued_items += waits;
  const auto placed = core_->deadlines.emplace(std::pair(batch->deadline_, batch->sequence_), batch).first;
  if (placed == core_->deadlines.begin()) core_->deadlines_changed.notify_one();
  if (items == 1) {
    core_->work_arrived.notify_one();
  } else {
    core_->work_arrived.notify_all();
  }
  for (const auto& lane : core_->lanes) lane->wake();
  return batch;
}

Counters Engine::counters() const {
  if (forked()) throw std::runtime_error(kForked);
  const auto read = [this](Op op, Status status) {
    return core_->counts[static_cast<std::size_t>(op)][static_cast<std::size_t>(status)].load(
        std::memory_order_relaxed);
  };
  const auto sum = [&read](Status status) {
    return read(Op::kPut, status) + read(Op::kPutAbsent, status) + read(Op::kGet, status) +
           read(Op::kContains, status) + read(Op::kDelete, status) + read(Op::kTouch, status);
  };
  const auto nbytes = [this](Op op) {
    return core_->ok_nbytes[static_cast<std::size_t>(op)].load(std::memory_order_relaxed);
  };
  Counters counters = {
      {"puts", read(Op::kPut, Status::kOk) + read(Op::kPutAbsent, Status::kOk)},
      {"put_nbytes", nbytes(Op::kPut) + nbytes(Op::kPutAbsent)},
      {"present_puts", read(Op::kPutAbsent, Status::kPresent)},
      {"get_hits", read(Op::kGet, Status::kOk)},
      {"get_misses", read(Op::kGet, Status::kMiss)},
      {"get_nbytes", nbytes(Op::kGet)},
      {"contains_hits", read(Op::kContains, Status::kOk) + read(Op::kTouch, Status::kOk)},
      {"contains_misses", read(Op::kContains, Status::kMiss) + read(Op::kTouch, Status::kMiss)},
      {"deletes", read(Op::kDelete, Status::kOk)},
      {"delete_misses", read(Op::kDelete, Status::kMiss)},
      {"no_room", sum(Status::kNoRoom)},
      {"faults", sum(Status::kFault)},
      {"cancelled", sum(Status::kCancelled)},
      {"timed_out", sum(Status::kTimedOut)},
      {"joined_puts", core_->joined_puts.load(std::memory_order_relaxed)},
  };
  {
    const Core::Lock lock(core_->mutex);
    counters.emplace_back("queued", core_->queued_items);
  }
  core_->backend->append_counters(counters);
  return counters;
}

bool Engine::close(Clock::duration timeout) {
  if (forked()) return true;
  const Clock::time_point until = Clock::now() + timeout;
  std::vector<std::thread> ended;
  {
    Core::Lock lock(core_->mutex);
    while (!core_->deadlines.empty()) {
      const std::shared_ptr<Batch> batch = core_->deadlines.begin()->second;
      core_->expired.emplace(batch->sequence_, batch);
      core_->deadlines.erase(core_->deadlines.begin());
      core_->stop(batch, Status::kCancelled);
    }
    // After that: a lane that sees it ends what it holds, which is to be cancelled and no fault.
    core_->closing.store(true);
    core_->work_arrived.notify_all();
    core_->deadlines_changed.notify_all();
    for (const auto& lane : core_->lanes) lane->wake();
    if (!core_->thread_ended.wait_until(lock, until, [this] { return core_->live_threads == 0; }))
      return false;
    ended.swap(core_->threads);
  }
  // Each has announced its end: joining does not wait for anything but its last instructions.
  for (auto& thread : ended) thread.join();
  // Batches outlive this, and keep the Core.
  const Core::Lock lock(core_->mutex);
  core_->writing.clear();
  core_->bereft.clear();
  core_->lanes.clear();
  return true;
}

}  // namespace kvpool
