// Forwards callers' items. See items.h.
#include "store/near_far/items.h"

#include <algorithm>
#include <map>
#include <utility>

namespace kvpool {
namespace {

using namespace std::chrono_literals;

// Near, where the others wait behind what comes later and is more urgent.
constexpr std::size_t kMaxNear = 128;
constexpr std::size_t kMaxNearPuts = 16;
// What waits for a silent far pool has no place near. As many as a queue of an executor has.
constexpr std::size_t kMaxFar = kMaxQueuedItems;
constexpr Clock::duration kLook = 20ms;  // for stopped items, and for bytes that moved
constexpr int kLookShare = 20;           // of the time that a look takes
constexpr Clock::duration kAges = std::chrono::hours(1);
// Of what is left to a question of presence: near's answer is still in time when far has none.
constexpr double kFarShare = 0.8;

bool is_presence(Op op) { return op == Op::kTouch || op == Op::kContains; }
bool asks_both(Op op) { return op == Op::kDelete || op == Op::kExpire; }

}  // namespace

void Items::take(Source& source) {
  while (near_ < kMaxNear) {
    std::vector<Item> taken;
    if (!source.try_take(taken, near_puts_ < kMaxNearPuts)) return;
    start(std::move(taken));
  }
}

// Those of one batch that move no bytes go together: one caller's deadline is no other's.
void Items::start(std::vector<Item> taken) {
  std::vector<Item> together;
  for (Item& item : taken) {
    if (!together.empty() && (moves_bytes(item.op()) || !item.is_of_batch(together.front()))) {
      begin(std::exchange(together, {}));
    }
    together.push_back(std::move(item));
  }
  if (!together.empty()) begin(std::move(together));
}

void Items::begin(std::vector<Item> items) {
  Task task;
  task.op = items.front().op();
  task.items = std::move(items);
  for (const Item& item : task.items) {
    const std::string& key = item.key().text;
    if (task.op == Op::kDelete) {
      task.deletes.push_back(key);
      deleting_.insert(key);
    } else if (deleting_.contains(key)) {
      task.deleted = true;
    }
  }
  if (task.op == Op::kDelete) {
    const std::unordered_set<std::string> deleted(task.deletes.begin(), task.deletes.end());
    for (const std::string& key : deleted) {
      behind_.forget(key);
      ahead_.forget(key);
    }
    tasks_.delete_keys(deleted);
  } else if (task.op == Op::kExpire) {
    std::unordered_set<std::string> gone;
    for (const Item& item : task.items) {
      behind_.let_go(item.key().text);
      gone.insert(item.key().text);
    }
    tasks_.let_go(gone);
  }
  submit(tasks_.add(std::move(task)), Step::kNear);
}

void Items::submit(Task& task, Step step) {
  const Clock::time_point now = Clock::now();
  std::vector<Key> keys;
  std::vector<Batch::Buffer> buffers;
  std::vector<Found> known;
  for (const Item& item : task.items) {
    keys.push_back(item.key());
    if (moves_bytes(task.op)) buffers.push_back(item.buffer());
    known.push_back({0, is_put(task.op) ? std::optional(item.seal()) : std::nullopt, item.used_at()});
  }
  const Item& first = task.items.front();
  Clock::duration longest = std::max<Clock::duration>(first.deadline(now + kAges) - now, 1ms);
  if (step == Step::kFar && is_presence(task.op)) {
    longest = std::chrono::duration_cast<Clock::duration>(longest * kFarShare);
  }
  const Clock::duration timeout = std::min(first.timeout(), longest);
  task.step = step;
  if (step == Step::kNear) {
    ++near_;
    near_puts_ += is_put(task.op);
  } else {
    far_ += task.items.size();
  }
  IoExecutor& executor = step == Step::kNear ? backend_.near() : backend_.far();
  const std::string refusal =
      tasks_.send(task, executor, std::move(keys), std::move(buffers), timeout, longest, std::move(known));
  if (refusal.empty()) return;
  if (step == Step::kNear) {
    --near_;
    near_puts_ -= is_put(task.op);
  } else {
    far_ -= task.items.size();
  }
  Tasks::finish_all(task, Status::kFault, refusal);
  end(task);
}

void Items::end(Task& task) {
  for (const std::string& key : task.deletes) deleting_.erase(deleting_.find(key));
  tasks_.drop(task);
}

Clock::time_point Items::look(Clock::time_point now) {
  if (now < look_at_) return look_at_;
  const Clock::time_point moved = std::max(backend_.near().moved_at(), backend_.far().moved_at());
  bool waits = ahead_.is_busy();
  tasks_.for_each([&](Task& task) {
    if (task.items.empty() || task.batch == nullptr) return;
    waits = true;
    if (moved > told_) task.items.front().moved(told_ = moved);
    if (Tasks::all_stopped(task)) task.batch->cancel();
  });
  ahead_.look();
  look_at_ = Clock::now();
  look_at_ += std::max<Clock::duration>(kLook, kLookShare * (look_at_ - now));
  return waits ? look_at_ : Clock::time_point::max();
}

void Items::go_on(Task& task, const Batch& batch) {
  return task.step == Step::kNear ? near_ended(task, batch) : far_ended(task, batch);
}

void Items::near_ended(Task& task, const Batch& batch) {
  --near_;
  near_puts_ -= is_put(task.op);
  std::vector<Item> rest;
  for (std::size_t i = 0; i < task.items.size(); ++i) {
    Item& item = task.items[i];
    const Status status = batch.results()[i];
    const std::optional<Status> stopped = item.stopped();
    if (is_fault(status) && !stopped) backend_.add(Count::kNearFaults);
    if (stopped) {
      item.finish(*stopped);
    } else if (item.prefetch_nbytes() != 0) {
      if (status == Status::kMiss && !task.deleted) {
        ahead_.wish(std::move(item));
      } else {
        if (is_found(status)) behind_.used(item.key(), batch.found(i).nbytes, false);
        item.finish(is_found(status) ? Status::kPresent : status, batch.error().value_or(""));
      }
    } else if (asks_both(task.op) || !is_found(status)) {
      if (asks_both(task.op)) task.found.push_back(status);
      rest.push_back(std::move(item));
    } else {
      end_near(item, batch, i);
    }
  }
  task.items = std::move(rest);
  if (task.items.empty()) return end(task);
  go_far(task);
}

// What near had, or took.
void Items::end_near(Item& item, const Batch& batch, std::size_t place) {
  const Status status = batch.results()[place];
  const std::size_t nbytes = batch.found(place).nbytes;
  if (item.op() == Op::kGet) {
    backend_.add(Count::kNearHits);
    behind_.used(item.key(), nbytes, true);
    item.tell(batch.found(place));
  } else if (is_put(item.op()) && status == Status::kPresent) {
    behind_.used(item.key(), nbytes, true);
  } else if (is_put(item.op()) && (backend_.all() || item.op() == Op::kPut)) {
    behind_.put(item, batch.found(place));
  } else if (item.op() == Op::kTouch) {
    behind_.used(item.key(), nbytes, false);
  }
  item.finish(is_put(item.op()) ? status : Status::kNear);
}

// A question of presence goes in a batch for each shard: one that is silent keeps no answer of another's.
void Items::go_far(Task& task) {
  if (far_ + task.items.size() > kMaxFar) {
    const bool is_miss = is_presence(task.op);
    backend_.add(Count::kFarFaults, task.items.size());
    Tasks::finish_all(task, is_miss ? Status::kMiss : Status::kFault,
                      is_miss ? "" : "too many keys wait for the far pool");
    return end(task);
  }
  if (!is_presence(task.op) || task.items.size() == 1) return submit(task, Step::kFar);
  std::map<std::string, std::vector<Item>> by_shard;
  for (Item& item : task.items) by_shard[backend_.far().shard_of(item.key().text)].push_back(std::move(item));
  const bool deleted = task.deleted;
  tasks_.drop(task);
  for (auto& [shard, items] : by_shard) {
    Task part;
    part.op = items.front().op();
    part.deleted = deleted;
    part.items = std::move(items);
    submit(tasks_.add(std::move(part)), Step::kFar);
  }
}

void Items::far_ended(Task& task, const Batch& batch) {
  far_ -= task.items.size();
  const std::string error = batch.error().value_or("");
  for (std::size_t i = 0; i < task.items.size(); ++i) {
    Item& item = task.items[i];
    Status status = batch.results()[i];
    if (const std::optional<Status> stopped = item.stopped(); stopped && is_fault(status)) {
      item.finish(*stopped);
      continue;
    }
    if (is_fault(status)) backend_.add(Count::kFarFaults);
    if (!task.found.empty() && is_found(task.found[i]) && status == Status::kMiss) status = Status::kOk;
    if (is_presence(item.op()) && is_fault(status)) status = Status::kMiss;
    if (item.op() == Op::kGet && status == Status::kOk) {
      backend_.add(Count::kFarHits);
      behind_.used_far(item.key());
      item.tell(batch.found(i));
      if (!task.deleted) ahead_.fill(item, batch.found(i));
    }
    item.finish(status, is_fault(status) ? error : "");
  }
  end(task);
}

}  // namespace kvpool
