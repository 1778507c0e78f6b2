// Batches, their items, I/O threads' sources, and the threads. See io_executor.h.
#include "store/io_executor.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "store/executor_core.h"

namespace kvpool {
namespace {

constexpr Clock::duration kDestructorTimeout = std::chrono::seconds(5);
constexpr const char* kForked = "the executor was made before fork(): make one in this process";

// The process's signals belong to the caller's threads (Python runs handlers in the main thread).
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

void DamageCounts::append(Counters& counters) const {
  const std::size_t sum = counters.size();
  counters.emplace_back("damaged", 0);
  for (std::size_t i = 1; i < kDamageCount; ++i) {
    counters.emplace_back("damaged_" + std::string(damage_name(static_cast<Damage>(i))),
                          counts_[i].load(std::memory_order_relaxed));
    counters[sum].second += counters.back().second;
  }
}

Batch::Batch(Op op, std::vector<Key> keys, std::vector<Buffer> buffers, Clock::duration timeout,
             Clock::duration longest, std::vector<Found> known)
    : op_(op),
      keys_(std::move(keys)),
      buffers_(std::move(buffers)),
      timeout_(timeout),
      last_(submitted_ + longest),
      results_(keys_.size(), Status::kFault),
      found_(std::move(known)),
      unfinished_(keys_.size()) {
  found_.resize(keys_.size());
}

// A lookup counts as use of its hits.
Batch::Batch(std::unique_ptr<Lookup> lookup, Clock::duration timeout)
    : op_(Op::kTouch),
      lookup_(std::move(lookup)),
      timeout_(timeout),
      last_(submitted_ + timeout),
      results_(lookup_->record_count(), Status::kNear),
      unfinished_(lookup_->key_count()) {}

// Parts of a record end in several threads; the worst status stays.
void Batch::set_record(std::size_t record, Status status) {
  const auto rank = [](Status one) {
    switch (one) {
      case Status::kNear:
        return 0;
      case Status::kOk:
        return 1;
      case Status::kPresent:
        return 2;
      default:
        return one == Status::kMiss ? 3 : 4;
    }
  };
  const std::atomic_ref<Status> result(results_[record]);
  Status known = result.load(std::memory_order_relaxed);
  while (rank(known) < rank(status)) {
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
  // The caller has its own reference; stop() may drop the queue's.
  const auto found = core->deadlines.find({timer_, sequence_});
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

std::optional<Status> Item::stopped(Clock::time_point moved_at) const {
  const Status stop = batch_->stop_.load(std::memory_order_relaxed);
  if (stop != Status::kOk) return stop;
  if (Clock::now() >= batch_->due(moved_at)) return Status::kTimedOut;
  return std::nullopt;
}

std::optional<Status> Item::stopped() const { return stopped(batch_->core_->moved_at()); }

Clock::time_point Item::used_at() const {
  const std::optional<Clock::time_point> known =
      batch_->lookup_ ? std::nullopt : batch_->found_[index_].used_at;
  return known.value_or(batch_->submitted_ - std::chrono::microseconds(index_));
}

void Item::moved(Clock::time_point now) const { batch_->core_->moved(now); }

void Item::finish(Status status, std::string error, Blame blame) {
  const std::shared_ptr<Batch> batch = std::move(batch_);
  const std::shared_ptr<Core> core = batch->core_;
  core->finish(*batch, index_, status, std::move(error), blame);
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

bool Source::try_take(std::vector<Item>& items, bool puts_too) {
  const std::size_t before = items.size();
  // Before the lock: a failed allocation under it would finish an item, which waits for the lock for ever.
  items.reserve(before + kMaxTogether);
  {
    const Core::Lock lock(core_.mutex);
    while (!core_.closing.load() && items.size() - before < kMaxTogether) {
      auto item = core_.take(puts_too);
      if (!item) break;
      items.push_back(std::move(*item));
      if (moves_bytes(items.back().op())) break;
    }
  }
  for (std::size_t i = before; i < items.size(); ++i) items[i].spell();
  return items.size() != before;
}

bool Source::closing() const { return core_.closing.load(); }

IoExecutor::IoExecutor(std::unique_ptr<Backend> backend, unsigned threads)
    : core_(std::make_shared<Core>(std::move(backend))) {
  for (unsigned i = 0; i < threads; ++i) core_->io_threads.push_back(core_->backend->make_io_thread(i));

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
    } catch (const std::system_error& error) {
      core_->end_thread();
      throw std::system_error(error.code(), "no thread could be started");
    } catch (...) {
      core_->end_thread();
      throw;
    }
  };
  try {
    for (unsigned i = 0; i < threads; ++i) {
      start("kvpool-io-" + std::to_string(i), [i](Core& core) { core.run_io_thread(*core.io_threads[i]); });
    }
    start("kvpool-timer", [](Core& core) { core.run_deadlines(); });
  } catch (...) {
    close(kDestructorTimeout);
    throw;
  }
}

IoExecutor::~IoExecutor() {
  if (forked()) {
    // std::thread's destructor would end the process, and a lock may be held for ever: leak it all.
    new std::shared_ptr<Core>(std::move(core_));
    return;
  }
  if (close(kDestructorTimeout)) return;
  const Core::Lock lock(core_->mutex);
  for (auto& thread : core_->threads) thread.detach();
  core_->threads.clear();
}

bool IoExecutor::forked() const { return getpid() != core_->pid; }

std::shared_ptr<Batch> IoExecutor::submit(Op op, std::vector<Key> keys, std::vector<Batch::Buffer> buffers,
                                          Clock::duration timeout, std::optional<Clock::duration> longest,
                                          std::function<void()> on_done, std::vector<Found> known) {
  auto batch = std::make_shared<Batch>(op, std::move(keys), std::move(buffers), timeout,
                                       longest.value_or(timeout), std::move(known));
  batch->on_done_ = std::move(on_done);
  return submit(std::move(batch));
}

std::shared_ptr<Batch> IoExecutor::submit(std::unique_ptr<Lookup> lookup, Clock::duration timeout) {
  return submit(std::make_shared<Batch>(std::move(lookup), timeout));
}

std::shared_ptr<Batch> IoExecutor::submit(std::shared_ptr<Batch> batch) {
  if (forked()) throw std::runtime_error(kForked);
  const std::size_t items = batch->item_count();
  const std::size_t waits = batch->lookup_ ? 1 : items;
  batch->core_ = core_;
  const Core::Lock lock(core_->mutex);
  if (core_->closing.load()) throw std::runtime_error("the executor is closed");
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
  batch->timer_ = batch->due({});
  const auto placed = core_->deadlines.emplace(std::pair(batch->timer_, batch->sequence_), batch).first;
  if (placed == core_->deadlines.begin()) core_->deadlines_changed.notify_one();
  if (items == 1) {
    core_->work_arrived.notify_one();
  } else {
    core_->work_arrived.notify_all();
  }
  for (const auto& io_thread : core_->io_threads) io_thread->wake();
  return batch;
}

std::string IoExecutor::shard_of(std::string_view key) const { return core_->backend->shard_of(key); }

Clock::time_point IoExecutor::moved_at() const { return core_->moved_at(); }

Counters IoExecutor::counters() const {
  if (forked()) throw std::runtime_error(kForked);
  const auto read = [this](Op op, Status status) {
    return core_->counts[static_cast<std::size_t>(op)][static_cast<std::size_t>(status)].load(
        std::memory_order_relaxed);
  };
  const auto sum = [&read](Status status) {
    return read(Op::kPut, status) + read(Op::kPutAbsent, status) + read(Op::kGet, status) +
           read(Op::kContains, status) + read(Op::kDelete, status) + read(Op::kTouch, status) +
           read(Op::kExpire, status);
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
      {"expires", read(Op::kExpire, Status::kOk)},
      {"expire_misses", read(Op::kExpire, Status::kMiss)},
      {"no_room", sum(Status::kNoRoom)},
      {"faults", sum(Status::kFault) + sum(Status::kRefused)},
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

bool IoExecutor::close(Clock::duration timeout) {
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
    // Afterwards, so that an I/O thread that sees it ends its items as cancelled, not as faults.
    core_->closing.store(true);
    core_->work_arrived.notify_all();
    core_->deadlines_changed.notify_all();
    for (const auto& io_thread : core_->io_threads) io_thread->wake();
    if (!core_->thread_ended.wait_until(lock, until, [this] { return core_->live_threads == 0; }))
      return false;
    ended.swap(core_->threads);
  }
  // Each has announced its end: a join waits only for its last instructions.
  for (auto& thread : ended) thread.join();
  // Batches outlive this, and keep the Core.
  const Core::Lock lock(core_->mutex);
  core_->writing.clear();
  core_->orphaned_puts.clear();
  core_->io_threads.clear();
  return true;
}

}  // namespace kvpool
