// Shared by an executor's I/O threads, deadlines and callers: queues and batches. See io_executor.h.
#pragma once

#include <unistd.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "store/io_executor.h"

namespace kvpool {

inline constexpr std::size_t kQueueCount = 3;

std::size_t queue_of(Op op);

struct Core {
  explicit Core(std::unique_ptr<Backend> backend_) : backend(std::move(backend_)), pid(getpid()) {}

  const std::unique_ptr<Backend> backend;
  const pid_t pid;
  std::vector<std::unique_ptr<IoThread>> io_threads;  // constant while the threads run

  mutable std::mutex mutex;
  std::condition_variable work_arrived;
  std::condition_variable deadlines_changed;
  std::condition_variable thread_ended;
  std::array<std::list<std::shared_ptr<Batch>>, kQueueCount> queues;
  std::size_t queued_items = 0;
  // An untaken item of a batch, listed in its batch's `waiting_`.
  struct Waiter {
    std::shared_ptr<Batch> batch;
    std::size_t index;
  };
  // A put in flight, and the puts of the same key and length that get its result.
  struct Writing {
    const Batch* batch;
    std::size_t index;
    std::vector<Waiter> waiters;
  };
  std::unordered_map<std::string_view, Writing> writing;  // by key, whose text the put's batch owns
  std::deque<Waiter> orphaned_puts;                       // the awaited put was given up
  // Every unfinished batch by deadline; `expired` once the deadline was handled.
  std::map<std::pair<Clock::time_point, std::uint64_t>, std::shared_ptr<Batch>> deadlines;
  std::map<std::uint64_t, std::shared_ptr<Batch>> expired;
  std::uint64_t last_sequence = 0;
  unsigned live_threads = 0;
  std::vector<std::thread> threads;

  std::atomic<Clock::rep> moved_at_ticks{0};  // of the last byte that any I/O thread moved

  std::atomic<bool> closing{false};
  std::array<std::array<std::atomic<std::uint64_t>, kStatusCount>, kOpCount> counts{};
  std::array<std::atomic<std::uint64_t>, kOpCount> ok_nbytes{};
  std::atomic<std::uint64_t> joined_puts{0};

  using Lock = std::unique_lock<std::mutex>;

  void moved(Clock::time_point now) {
    moved_at_ticks.store(now.time_since_epoch().count(), std::memory_order_relaxed);
  }
  Clock::time_point moved_at() const {
    return Clock::time_point(Clock::duration(moved_at_ticks.load(std::memory_order_relaxed)));
  }

  void count_given_up(const Batch& batch, std::size_t items, Status status);
  void count(const Batch& batch, std::size_t index, Status status);
  void complete(Batch& batch);
  void leave_queue(Batch& batch);
  void pass_over(Batch& batch, std::size_t until, Status status);
  void skip_unwanted(Batch& batch);
  void stop(const std::shared_ptr<Batch>& batch, Status status);
  std::optional<Item> take(bool puts_too = true);
  bool joins(const std::shared_ptr<Batch>& batch, std::size_t index);
  std::optional<Item> take_orphaned_put();
  void end_waiters(const Batch& batch, std::size_t index, Status status, const std::string& error,
                   Blame blame);
  void finish(Batch& batch, std::size_t index, Status status, std::string error, Blame blame);
  void run_io_thread(IoThread& io_thread);
  void run_deadlines();
  void end_thread();
};

}  // namespace kvpool
