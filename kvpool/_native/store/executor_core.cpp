// Queues, hands out, finishes and gives up items. See executor_core.h.
#include "store/executor_core.h"

#include <algorithm>
#include <iterator>

namespace kvpool {
namespace {

// Keys of a long lookup before another batch's turn.
constexpr std::size_t kTurnKeys = 256;
constexpr Clock::duration kPauseAfterException = std::chrono::milliseconds(10);

}  // namespace

// Lookups are cheap, and requests wait for them; requests wait for loads, but never for stores.
std::size_t queue_of(Op op) { return is_put(op) ? 2 : op == Op::kGet ? 1 : 0; }

void Core::count_given_up(const Batch& batch, std::size_t items, Status status) {
  counts[static_cast<std::size_t>(batch.op_)][static_cast<std::size_t>(status)].fetch_add(
      items, std::memory_order_relaxed);
}

void Core::count(const Batch& batch, std::size_t index, Status status) {
  count_given_up(batch, 1, status);
  if (status == Status::kOk && !batch.buffers_.empty()) {
    ok_nbytes[static_cast<std::size_t>(batch.op_)].fetch_add(batch.buffers_[index].size(),
                                                             std::memory_order_relaxed);
  }
}

// Under the lock.
void Core::complete(Batch& batch) {
  batch.done_.store(true, std::memory_order_release);
  batch.done_changed_.notify_all();
  if (batch.on_done_) batch.on_done_();
  // The caller holds its own reference.
  deadlines.erase({batch.timer_, batch.sequence_});
  expired.erase(batch.sequence_);
}

void Core::leave_queue(Batch& batch) {
  if (!batch.queued_) return;
  batch.queued_ = false;
  queues[queue_of(batch.op_)].erase(batch.place_);
  if (batch.lookup_) --queued_items;
}

// Under the lock: ends the untaken items of a lookup.
void Core::pass_over(Batch& batch, std::size_t until, Status status) {
  const std::size_t end = batch.lookup_->record_of(until);
  for (std::size_t record = batch.lookup_->record_of(batch.next_); record < end; ++record) {
    batch.set_record(record, status);
  }
  batch.next_ = until;
}

// Under the lock: records keys of a lookup no longer worth asking as misses.
void Core::skip_unwanted(Batch& batch) {
  const std::size_t wanted = batch.lookup_->next_wanted(batch.next_);
  const std::size_t skipped = wanted - batch.next_;
  if (skipped == 0) return;
  pass_over(batch, wanted, Status::kMiss);
  if (wanted == batch.item_count()) leave_queue(batch);
  if (batch.unfinished_.fetch_sub(skipped, std::memory_order_acq_rel) == skipped) complete(batch);
}

// Under the lock: gives up untaken items, and makes I/O threads give up the rest.
void Core::stop(const std::shared_ptr<Batch>& batch, Status status) {
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
    for (const auto& io_thread : io_threads) io_thread->wake();
  }
}

// Under the lock.
std::optional<Item> Core::take(bool puts_too) {
  for (auto& queue : queues) {
    if (&queue == &queues[queue_of(Op::kPut)]) {
      if (!puts_too) break;
      if (auto item = take_orphaned_put()) return item;
    }
    while (!queue.empty()) {
      const std::shared_ptr<Batch> batch = queue.front();
      if (Clock::now() >= batch->due(moved_at())) {
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

// Under the lock: whether this put waits for a put in flight. If not, later puts wait for it.
bool Core::joins(const std::shared_ptr<Batch>& batch, std::size_t index) {
  const auto [place, first] = writing.try_emplace(batch->keys_[index].text, Writing{batch.get(), index, {}});
  if (first) return false;
  Writing& other = place->second;
  // Lengths differ, so contents differ: neither put replaces the other.
  if (other.batch->buffers_[other.index].size() != batch->buffers_[index].size()) return false;
  // This put must replace a present value, the other may not.
  if (batch->op_ == Op::kPut && other.batch->op_ == Op::kPutAbsent) return false;
  other.waiters.push_back({batch, index});
  batch->waiting_.insert(index);
  return true;
}

// Under the lock.
std::optional<Item> Core::take_orphaned_put() {
  while (!orphaned_puts.empty()) {
    const Waiter waiter = std::move(orphaned_puts.front());
    orphaned_puts.pop_front();
    // The batch, and so this item, was stopped.
    if (waiter.batch->waiting_.erase(waiter.index) == 0) continue;
    if (joins(waiter.batch, waiter.index)) continue;
    return std::optional<Item>(std::in_place, waiter.batch, waiter.index);
  }
  return std::nullopt;
}

// A put's end also ends its waiters, unless it was given up.
void Core::end_waiters(const Batch& batch, std::size_t index, Status status, const std::string& error,
                       Blame blame) {
  const Lock lock(mutex);
  const auto found = writing.find(batch.keys_[index].text);
  if (found == writing.end() || found->second.batch != &batch || found->second.index != index) return;
  std::vector<Waiter> waiters = std::move(found->second.waiters);
  writing.erase(found);
  if (waiters.empty()) return;
  if (status == Status::kCancelled || status == Status::kTimedOut) {
    std::move(waiters.begin(), waiters.end(), std::back_inserter(orphaned_puts));
    work_arrived.notify_all();
    for (const auto& io_thread : io_threads) io_thread->wake();
    return;
  }
  for (const Waiter& waiter : waiters) {
    if (waiter.batch->waiting_.erase(waiter.index) == 0) continue;
    const bool is_present = status == Status::kOk && waiter.batch->op_ == Op::kPutAbsent;
    const Status result = is_present ? Status::kPresent : status;
    waiter.batch->results_[waiter.index] = result;
    count_given_up(*waiter.batch, 1, result);
    joined_puts.fetch_add(1, std::memory_order_relaxed);
    waiter.batch->found_[waiter.index] = batch.found_[index];
    if (!error.empty() && !waiter.batch->error_) waiter.batch->fail(error, blame);
    if (waiter.batch->unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) complete(*waiter.batch);
  }
}

void Core::finish(Batch& batch, std::size_t index, Status status, std::string error, Blame blame) {
  const bool is_ok = status == Status::kOk || status == Status::kNear;
  count(batch, index, is_ok ? Status::kOk : status);
  if (moves_bytes(batch.op_) && (is_ok || status == Status::kMiss)) moved(Clock::now());
  if (batch.lookup_) {
    batch.set_record(batch.lookup_->record_of(index), status);
    if (status == Status::kMiss) batch.lookup_->missed(index);
    const bool is_answer = status == Status::kMiss || is_ok || status == Status::kPresent;
    if (!is_answer) batch.lookup_->give_up();
  } else {
    batch.results_[index] = status;
  }
  if (is_put(batch.op_)) end_waiters(batch, index, status, error, blame);
  if (!error.empty()) {
    const Lock lock(mutex);
    if (!batch.error_) batch.fail(std::move(error), blame);
  }
  if (batch.unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    const Lock lock(mutex);
    complete(batch);
  }
}

void Core::run_io_thread(IoThread& io_thread) {
  Source source(*this);
  while (!closing.load()) {
    try {
      io_thread.run(source);
    } catch (...) {
      // Its items' destructors finished them as faults. Only allocations throw here: pause rather than spin.
      std::this_thread::sleep_for(kPauseAfterException);
    }
  }
}

void Core::run_deadlines() {
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
    deadlines.erase(first);
    batch->timer_ = batch->due(moved_at());
    if (batch->timer_ > deadline) {
      deadlines.emplace(std::pair(batch->timer_, batch->sequence_), batch);
      continue;
    }
    expired.emplace(batch->sequence_, batch);
    stop(batch, Status::kTimedOut);
  }
}

void Core::end_thread() {
  const Lock lock(mutex);
  --live_threads;
  thread_ended.notify_all();
}

}  // namespace kvpool
