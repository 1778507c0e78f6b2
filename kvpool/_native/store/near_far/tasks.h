// The tasks of a near and a far pool, and their batches. One thread.
#pragma once

#include <functional>
#include <list>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "store/near_far/copy_memory.h"
#include "store/near_far/ended.h"
#include "store/near_far/task.h"

namespace kvpool {

class Tasks {
 public:
  Tasks(CopyMemory& memory, std::shared_ptr<Ended> ended) : memory_(memory), ended_(std::move(ended)) {}
  Tasks(const Tasks&) = delete;
  Tasks& operator=(const Tasks&) = delete;

  Task& add(Task task);
  // Submits it, with `known` of the values of a put. Returns why no executor takes it, which then has no batch; empty:
  // it ends through `ended`.
  std::string send(Task& task, IoExecutor& executor, std::vector<Key> keys,
                   std::vector<Batch::Buffer> buffers, Clock::duration timeout, Clock::duration longest,
                   std::vector<Found> known = {});
  // Its memory goes back; an unfinished item of it ends as a fault.
  void drop(Task& task);
  // Marks those of any of these keys as deleted; or copies, as let go.
  void delete_keys(const std::unordered_set<std::string>& keys);
  void let_go(const std::unordered_set<std::string>& keys);
  void for_each(const std::function<void(Task&)>& call) {
    for (auto next = tasks_.begin(); next != tasks_.end();) call(*next++);
  }
  // Blocks until no batch uses a buffer of theirs, and cancels all items.
  void end_all();

  static bool all_stopped(const Task& task);
  static void finish_all(Task& task, Status status, const std::string& error = "");

 private:
  CopyMemory& memory_;
  const std::shared_ptr<Ended> ended_;
  std::list<Task> tasks_;
};

}  // namespace kvpool
