// What the thread of a near and a far pool waits for: ended batches, new or stopped items, a time.
//
// Shared with the two pools' threads, which may call it when that thread is gone; its mutex guards all.
#pragma once

#include <condition_variable>
#include <mutex>
#include <utility>

#include "store/near_far/task.h"

namespace kvpool {

class Ended {
 public:
  // The task's batch ended.
  void push(Task& task) noexcept {
    {
      const std::lock_guard lock(mutex_);
      task.next_ended = nullptr;
      (last_ == nullptr ? first_ : last_->next_ended) = &task;
      last_ = &task;
      is_set_ = true;
    }
    changed_.notify_one();
  }
  void wake() noexcept {
    {
      const std::lock_guard lock(mutex_);
      is_set_ = true;
    }
    changed_.notify_one();
  }
  // The tasks that ended, in their order, linked by `next_ended`.
  Task* take() {
    const std::lock_guard lock(mutex_);
    last_ = nullptr;
    return std::exchange(first_, nullptr);
  }
  // Until push() or wake() since the last return; `until`: max() is for ever.
  void wait_until(Clock::time_point until) {
    std::unique_lock lock(mutex_);
    if (until == Clock::time_point::max()) {
      changed_.wait(lock, [this] { return is_set_; });
    } else {
      changed_.wait_until(lock, until, [this] { return is_set_; });
    }
    is_set_ = false;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_set_ = false;
  Task* first_ = nullptr;
  Task* last_ = nullptr;
};

}  // namespace kvpool
