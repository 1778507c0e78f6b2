// Sends, ends and drops tasks.
#include "store/near_far/tasks.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace kvpool {

using namespace std::chrono_literals;

Task& Tasks::add(Task task) {
  tasks_.push_back(std::move(task));
  Task& added = tasks_.back();
  added.self = std::prev(tasks_.end());
  return added;
}

std::string Tasks::send(Task& task, IoExecutor& executor, std::vector<Key> keys,
                        std::vector<Batch::Buffer> buffers, Clock::duration timeout, Clock::duration longest,
                        std::vector<Found> known) {
  try {
    task.batch = executor.submit(
        task.op, std::move(keys), std::move(buffers), timeout, longest,
        [ended = ended_, here = &task] { ended->push(*here); }, std::move(known));
    return {};
  } catch (const std::runtime_error& error) {  // closed, or its queue is full
    return error.what();
  }
}

void Tasks::drop(Task& task) {
  memory_.give_back(std::move(task.memory));
  tasks_.erase(task.self);
}

void Tasks::delete_keys(const std::unordered_set<std::string>& keys) {
  for (Task& task : tasks_) {
    const auto is_deleted = [&](const Item& item) { return keys.contains(item.key().text); };
    task.deleted = task.deleted || (task.copy && keys.contains(task.copy->key.text)) ||
                   (!task.copy && std::ranges::any_of(task.items, is_deleted));
  }
}

void Tasks::let_go(const std::unordered_set<std::string>& keys) {
  for (Task& task : tasks_) {
    if (task.copy && keys.contains(task.copy->key.text)) task.copy->lets_go = true;
  }
}

void Tasks::end_all() {
  for (const Task& task : tasks_) {
    if (task.batch != nullptr) task.batch->cancel();
  }
  for (Task& task : tasks_) {
    while (task.batch != nullptr && !task.batch->wait_until(Clock::now() + 1s)) {
    }
    if (task.batch != nullptr) finish_all(task, Status::kCancelled);  // else an exception came in its middle
  }
  ended_->take();
  while (!tasks_.empty()) drop(tasks_.front());
}

bool Tasks::all_stopped(const Task& task) {
  return std::ranges::all_of(task.items, [](const Item& item) { return item.stopped().has_value(); });
}

void Tasks::finish_all(Task& task, Status status, const std::string& error) {
  for (Item& item : task.items) item.finish(item.stopped().value_or(status), error);
  task.items.clear();
}

}  // namespace kvpool
