// Fills, and copies ahead of loads. See ahead.h.
#include "store/near_far/ahead.h"

#include <cstring>
#include <span>
#include <utility>

namespace kvpool {

void Ahead::fill(const Item& got, const Found& found) {
  const std::span<const std::byte> value = got.buffer();
  if (!memory_.has_room(fills_, value.size())) return backend_.add(Count::kNotFilled);
  Task task;
  task.copy = Copy{got.key(), value.size(), false, false, 0, found.seal};
  task.memory = memory_.get(fills_, value.size());
  std::memcpy(task.memory.bytes.get(), value.data(), value.size());
  send(tasks_.add(std::move(task)), Step::kFill);
}

void Ahead::wish(Item item) {
  const auto [wanted, is_new] = wanted_.try_emplace(item.key().text);
  if (!is_new) {
    auto& items = wanted->second.task != nullptr ? wanted->second.task->items : wanted->second.wish->items;
    return items.push_back(std::move(item));
  }
  if (wanted_.size() > kMaxAhead) {
    wanted_.erase(wanted);
    backend_.add(Count::kNotFilled);
    return item.finish(Status::kNoRoom);
  }
  Shard& shard = shards_.of(item.key().text);
  Wish& wish = shard.ahead.emplace_back();
  wish.copy = {item.key(), item.prefetch_nbytes()};
  wish.items.push_back(std::move(item));
  wanted->second = {&shard, std::prev(shard.ahead.end()), nullptr};
  ++waiting_;
}

void Ahead::forget(const std::string& key) {
  const auto wanted = wanted_.find(key);
  if (wanted == wanted_.end() || wanted->second.task != nullptr) return;  // a task is marked
  for (Item& item : wanted->second.wish->items) item.finish(item.stopped().value_or(Status::kMiss));
  wanted->second.shard->ahead.erase(wanted->second.wish);
  wanted_.erase(wanted);
  --waiting_;
}

void Ahead::look() {
  if (waiting_ == 0) return;
  shards_.for_each([this](Shard& shard) {
    std::erase_if(shard.ahead, [this](Wish& wish) {
      for (const Item& item : wish.items) {
        if (!item.stopped()) return false;
      }
      for (Item& item : wish.items) item.finish(item.stopped().value_or(Status::kCancelled));
      wanted_.erase(wish.copy.key.text);
      --waiting_;
      return true;
    });
  });
}

void Ahead::step() {
  for (bool sent = waiting_ != 0; sent;) {
    sent = false;
    shards_.for_each([&](Shard& shard) {
      if (shard.ahead.empty() || !memory_.has_room(shard.ahead_memory, shard.ahead.front().copy.nbytes))
        return;
      sent = true;
      begin(shard);
    });
  }
}

void Ahead::begin(Shard& shard) {
  Wish wish = std::move(shard.ahead.front());
  shard.ahead.pop_front();
  --waiting_;
  Task task;
  task.shard = &shard;
  task.memory = memory_.get(shard.ahead_memory, wish.copy.nbytes);
  task.items = std::move(wish.items);
  task.copy = std::move(wish.copy);
  Task& added = tasks_.add(std::move(task));
  ++shard.asking;
  wanted_[added.copy->key.text].task = &added;
  send(added, Step::kReadAhead);
}

void Ahead::send(Task& task, Step step) {
  const Copy& copy = *task.copy;
  const bool reads = step == Step::kReadAhead;
  task.step = step;
  task.op = reads ? Op::kGet : Op::kPutAbsent;
  IoExecutor& executor = reads ? backend_.far() : backend_.near();
  const std::string refusal =
      tasks_.send(task, executor, {copy.key}, {{task.memory.bytes.get(), copy.nbytes}}, kCopyTimeout,
                  kCopyTimeout, {reads ? Found{} : Found{copy.nbytes, copy.seal}});
  if (refusal.empty()) return;
  Tasks::finish_all(task, Status::kFault, refusal);
  if (!reads) backend_.add(Count::kNotFilled);
  end(task);
}

void Ahead::go_on(Task& task, const Batch& batch) {
  return task.step == Step::kReadAhead ? read_ended(task, batch) : fill_ended(task, batch);
}

void Ahead::read_ended(Task& task, const Batch& batch) {
  const Status status = batch.results()[0];
  if (status == Status::kOk && !task.deleted) {
    task.copy->seal = batch.found(0).seal;
    return send(task, Step::kFill);
  }
  if (was_joined_late(task, status)) return send(task, Step::kReadAhead);
  if (is_fault(status) && status != Status::kCancelled && !Tasks::all_stopped(task)) {
    backend_.add(Count::kFarFaults);
  }
  Tasks::finish_all(task, task.deleted ? Status::kMiss : status, batch.error().value_or(""));
  end(task);
}

// Cancelled for callers that had all given up, and then another one joined: it is copied for that one.
bool Ahead::was_joined_late(const Task& task, Status status) {
  return status == Status::kCancelled && !task.deleted && !Tasks::all_stopped(task);
}

void Ahead::fill_ended(Task& task, const Batch& batch) {
  if (was_joined_late(task, batch.results()[0])) return send(task, Step::kFill);
  const bool is_near = is_found(batch.results()[0]);
  backend_.add(!is_near ? Count::kNotFilled : task.items.empty() ? Count::kFilled : Count::kPrefetched);
  // Also of a lookup that was given up: its caller counts what came near.
  const Status status = task.deleted ? Status::kMiss : is_near ? Status::kOk : Status::kNoRoom;
  for (Item& item : task.items) item.finish(status);
  task.items.clear();
  if (task.deleted) {
    Task after;
    after.step = Step::kAfterCopy;
    after.op = Op::kDelete;
    Task& sent = tasks_.add(std::move(after));
    if (!tasks_.send(sent, backend_.near(), {task.copy->key}, {}, kCopyTimeout, kCopyTimeout).empty()) {
      tasks_.drop(sent);
    }
  }
  end(task);
}

void Ahead::end(Task& task) {
  if (task.shard != nullptr) {
    --task.shard->asking;
    const auto wanted = wanted_.find(task.copy->key.text);
    if (wanted != wanted_.end() && wanted->second.task == &task) wanted_.erase(wanted);
  }
  tasks_.drop(task);
}

void Ahead::end_all() {
  shards_.for_each([](Shard& shard) {
    for (Wish& wish : shard.ahead) {
      for (Item& item : wish.items) item.finish(item.stopped().value_or(Status::kCancelled));
    }
    shard.ahead.clear();
  });
  wanted_.clear();
  waiting_ = 0;
}

}  // namespace kvpool
