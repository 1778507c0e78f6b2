// Callers' items: near, and far for what near does not end. One thread.
#pragma once

#include <cstddef>
#include <string>
#include <unordered_set>
#include <vector>

#include "store/near_far/ahead.h"
#include "store/near_far/behind.h"
#include "store/near_far/near_far.h"
#include "store/near_far/tasks.h"

namespace kvpool {

class Items {
 public:
  Items(NearFarBackend& backend, Tasks& tasks, Ahead& ahead, Behind& behind)
      : backend_(backend), tasks_(tasks), ahead_(ahead), behind_(behind) {}

  // Takes what the source has, while near has room for it; a batch that ends makes room.
  void take(Source& source);
  // Cancels what callers have given up, and tells them of bytes that moved. When to call it again.
  Clock::time_point look(Clock::time_point now);
  // A task of ours ended.
  void go_on(Task& task, const Batch& batch);

 private:
  using Step = Task::Step;
  using Count = NearFarBackend::Count;

  void start(std::vector<Item> taken);
  void begin(std::vector<Item> items);
  void submit(Task& task, Step step);
  void near_ended(Task& task, const Batch& batch);
  void end_near(Item& item, const Batch& batch, std::size_t place);
  void go_far(Task& task);
  void far_ended(Task& task, const Batch& batch);
  void end(Task& task);

  NearFarBackend& backend_;
  Tasks& tasks_;
  Ahead& ahead_;
  Behind& behind_;
  std::size_t near_ = 0;  // tasks that are near
  std::size_t near_puts_ = 0;
  std::size_t far_ = 0;  // items that are far
  std::unordered_multiset<std::string> deleting_;
  Clock::time_point told_{};  // the last byte that moved
  Clock::time_point look_at_{};
};

}  // namespace kvpool
