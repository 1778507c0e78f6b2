// Forwards items to near and far, and copies between them. See near_far.h. Over 400 lines because each step of an
// item decides on the next one.
#include "store/near_far.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "store/copy_memory.h"

namespace kvpool {
namespace {

using namespace std::chrono_literals;
using Count = NearFarBackend::Count;

// Under way: near, where the others wait behind what comes later and is more urgent, and in all. What waits for a
// silent far pool must not keep others from near.
constexpr std::size_t kMaxNear = 128;
constexpr std::size_t kMaxNearPuts = 16;
constexpr std::size_t kMaxTasks = 8192;
constexpr std::size_t kMaxSent = 65'536;
constexpr Clock::duration kLook = 20ms;  // for stopped items, and for bytes that moved
constexpr Clock::duration kRetry = 1s;   // after a copy found far dead
constexpr Clock::duration kCopyTimeout = 30s;
constexpr Clock::duration kAges = std::chrono::hours(1);
// Of what is left to a question of presence: near's answer is still in time when far has none.
constexpr double kFarShare = 0.8;

constexpr std::array<const char*, NearFarBackend::kCountCount> kNames = {
    "near_hits", "far_hits",       "filled",      "not_filled", "behind",        "behind_present",
    "lost",      "refused_behind", "near_faults", "far_faults", "behind_waiting"};

bool is_presence(Op op) { return op == Op::kTouch || op == Op::kContains; }
bool is_found(Status status) { return status == Status::kOk || status == Status::kPresent; }
bool is_fault(Status status) {
  return status == Status::kFault || status == Status::kTimedOut || status == Status::kCancelled;
}

// What a batch's end wakes; it may outlive the thread.
class Signal {
 public:
  void set() noexcept {
    {
      const std::lock_guard lock(mutex_);
      is_set_ = true;
    }
    changed_.notify_one();
  }
  void wait_until(Clock::time_point until) {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, until, [this] { return is_set_; });
    is_set_ = false;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_set_ = false;
};

// A value to be copied far.
struct Behind {
  Key key;
  std::size_t nbytes;
  bool replaces;
};

// Items under way in one batch, or a copy of our own.
struct Task {
  enum class Step : std::uint8_t { kNear, kFar, kFill, kReadBehind, kWriteBehind };

  Step step = Step::kNear;
  Op op = Op::kGet;
  std::vector<Item> items;       // of a copy: none
  std::vector<Status> found;     // by item: what near said to a delete or an expiry
  std::optional<Behind> copied;  // of a copy
  CopyMemory::Piece memory;      // of a copy
  bool deleted = false;          // of a copy: the key was deleted meanwhile
  std::shared_ptr<Batch> batch;
};

class NearFarThread : public IoThread {
 public:
  explicit NearFarThread(NearFarBackend& backend) : backend_(backend) {}

  void wake() noexcept override { signal_->set(); }

  void run(Source& source) override {
    while (!source.closing()) {
      if (tasks_.empty() && behind_.empty()) {
        std::optional<Item> item = source.next();
        if (!item) break;
        std::vector<Item> taken;
        taken.push_back(std::move(*item));
        start(std::move(taken));
      }
      take(source);
      advance();
      copy_behind();
      tell_waiting();
      if (!tasks_.empty()) {
        signal_->wait_until(Clock::now() + kLook);
      } else if (!behind_.empty()) {
        signal_->wait_until(retry_at_);
      }
    }
    end();
  }

 private:
  using Step = Task::Step;
  using Tasks = std::list<Task>;

  void take(Source& source) {
    std::size_t near = 0, puts = 0;
    for (const Task& task : tasks_) {
      if (task.items.empty() || task.step != Step::kNear) continue;
      ++near;
      if (is_put(task.op)) ++puts;
    }
    while (near < kMaxNear && tasks_.size() < kMaxTasks) {
      std::vector<Item> taken;
      if (!source.try_take(taken, puts < kMaxNearPuts)) return;
      ++near;
      if (is_put(taken.back().op())) ++puts;
      start(std::move(taken));
    }
  }

  // Items of one operation that move no bytes go together.
  void start(std::vector<Item> taken) {
    std::unordered_set<std::string> deleted;
    for (Item& item : taken) {
      const bool joins = !tasks_.empty() && tasks_.back().batch == nullptr && tasks_.back().op == item.op() &&
                         !moves_bytes(item.op());
      if (!joins) {
        submit_last();
        tasks_.emplace_back().op = item.op();
      }
      if (item.op() == Op::kDelete) deleted.insert(item.key().text);
      tasks_.back().items.push_back(std::move(item));
    }
    if (!deleted.empty()) forget(deleted);
    submit_last();
  }

  void submit_last() {
    if (!tasks_.empty() && tasks_.back().batch == nullptr) submit(std::prev(tasks_.end()), Step::kNear);
  }

  // Sends a task's items. Without an executor that takes them, they end.
  void submit(Tasks::iterator task, Step step) {
    task->step = step;
    std::vector<Key> keys;
    std::vector<Batch::Buffer> buffers;
    const Clock::time_point now = Clock::now();
    Clock::time_point last = now + kAges;
    Clock::duration timeout = kAges;
    for (const Item& item : task->items) {
      keys.push_back(item.key());
      if (moves_bytes(task->op)) buffers.push_back(item.buffer());
      last = std::min(last, item.deadline(now + kAges));
      timeout = std::min(timeout, item.timeout());
    }
    Clock::duration longest = std::max<Clock::duration>(last - now, 1ms);
    if (step == Step::kFar && is_presence(task->op)) {
      longest = std::chrono::duration_cast<Clock::duration>(longest * kFarShare);
    }
    send(task, step == Step::kNear ? backend_.near() : backend_.far(), task->op, std::move(keys),
         std::move(buffers), std::min(timeout, longest), longest);
  }

  void send(Tasks::iterator task, IoExecutor& executor, Op op, std::vector<Key> keys,
            std::vector<Batch::Buffer> buffers, Clock::duration timeout, Clock::duration longest) {
    std::string refusal;
    try {
      task->batch = executor.submit(op, std::move(keys), std::move(buffers), timeout, longest,
                                    [signal = signal_] { signal->set(); });
      return;
    } catch (const std::runtime_error& error) {  // closed, or its queue is full
      refusal = error.what();
    }
    for (Item& item : task->items) item.finish(Status::kFault, refusal);
    if (task->copied) backend_.add(task->step == Step::kFill ? Count::kNotFilled : Count::kLost);
    drop(task);
  }

  void drop(Tasks::iterator task) {
    if (task->copied && task->step != Step::kFill) --copying_;
    memory_.give_back(std::move(task->memory));
    tasks_.erase(task);
  }

  void advance() {
    const Clock::time_point moved = std::max(backend_.near().moved_at(), backend_.far().moved_at());
    for (auto task = tasks_.begin(); task != tasks_.end();) {
      const auto here = task++;
      if (here->batch == nullptr) {  // an exception came between two steps: its items end as faults
        drop(here);
      } else if (here->batch->done()) {
        go_on(here);
      } else if (!here->items.empty()) {
        if (moved > told_) here->items.front().moved(told_ = moved);
        const auto stopped = [](const Item& item) { return item.stopped().has_value(); };
        if (std::all_of(here->items.begin(), here->items.end(), stopped)) here->batch->cancel();
      }
    }
  }

  void go_on(Tasks::iterator task) {
    const std::shared_ptr<Batch> batch = std::move(task->batch);
    switch (task->step) {
      case Step::kNear:
        return near_ended(task, *batch);
      case Step::kFar:
        return far_ended(task, *batch);
      case Step::kFill:
        backend_.add(is_found(batch->results()[0]) ? Count::kFilled : Count::kNotFilled);
        return copied(task, backend_.near());
      case Step::kReadBehind:
        return read_behind(task, *batch);
      case Step::kWriteBehind:
        return wrote_behind(task, *batch);
    }
  }

  void near_ended(Tasks::iterator task, const Batch& batch) {
    std::vector<Item> rest;
    const bool asks_both = task->op == Op::kDelete || task->op == Op::kExpire;
    for (std::size_t i = 0; i < task->items.size(); ++i) {
      Item& item = task->items[i];
      const Status status = batch.results()[i];
      const std::optional<Status> stopped = item.stopped();
      if (is_fault(status) && !stopped) backend_.add(Count::kNearFaults);
      if (stopped) {
        item.finish(*stopped);
      } else if (asks_both || !is_found(status)) {
        if (asks_both) task->found.push_back(status);
        rest.push_back(std::move(item));
      } else {
        if (item.op() == Op::kGet) {
          backend_.add(Count::kNearHits);
          used(item);
        } else if (status == Status::kPresent) {
          used(item);
        } else if (is_put(item.op()) && (backend_.all() || item.op() == Op::kPut)) {
          enqueue({item.key(), item.buffer().size(), item.op() == Op::kPut});
        }
        item.finish(status);
      }
    }
    task->items.swap(rest);
    if (task->items.empty()) return drop(task);
    submit(task, Step::kFar);
  }

  void far_ended(Tasks::iterator task, const Batch& batch) {
    const std::string error = batch.error().value_or("");
    for (std::size_t i = 0; i < task->items.size(); ++i) {
      Item& item = task->items[i];
      Status status = batch.results()[i];
      if (const std::optional<Status> stopped = item.stopped(); stopped && is_fault(status)) {
        item.finish(*stopped);
        continue;
      }
      if (is_fault(status)) backend_.add(Count::kFarFaults);
      if (!task->found.empty() && is_found(task->found[i]) && status == Status::kMiss) status = Status::kOk;
      if (is_presence(item.op()) && is_fault(status)) status = Status::kMiss;
      if (item.op() == Op::kGet && status == Status::kOk) {
        backend_.add(Count::kFarHits);
        fill(item);
      }
      item.finish(status, is_fault(status) ? error : "");
    }
    drop(task);
  }

  // Copies near what a get found far.
  void fill(const Item& item) {
    const std::span<const std::byte> value = item.buffer();
    if (!memory_.has_room(value.size())) return backend_.add(Count::kNotFilled);
    CopyMemory::Piece memory = memory_.get(value.size());
    std::memcpy(memory.bytes.get(), value.data(), value.size());
    copy(Step::kFill, {item.key(), value.size(), false}, std::move(memory));
  }

  void used(const Item& item) {
    if (backend_.all()) return;
    if (sent_.size() == kMaxSent) sent_.clear();
    if (sent_.insert(item.key().text).second) enqueue({item.key(), item.buffer().size(), false});
  }

  void enqueue(Behind value) {
    behind_.push_back(std::move(value));
    if (behind_.size() > kMaxBehind) {
      behind_.pop_front();
      backend_.add(Count::kLost);
    }
    tell_waiting();
  }

  void tell_waiting() { backend_.set_waiting(behind_.size() + copying_); }

  // A deleted key is not copied any more.
  void forget(const std::unordered_set<std::string>& keys) {
    std::erase_if(behind_, [&](const Behind& value) { return keys.contains(value.key.text); });
    for (const std::string& key : keys) sent_.erase(key);
    for (Task& task : tasks_) {
      if (task.copied && keys.contains(task.copied->key.text)) task.deleted = true;
    }
  }

  void copy_behind() {
    while (!behind_.empty() && tasks_.size() < kMaxTasks && Clock::now() >= retry_at_ &&
           memory_.has_room(behind_.front().nbytes) && !(far_failed_ && memory_.is_used())) {
      CopyMemory::Piece memory = memory_.get(behind_.front().nbytes);
      Behind value = std::move(behind_.front());
      behind_.pop_front();
      copy(Step::kReadBehind, std::move(value), std::move(memory));
    }
  }

  void copy(Step step, Behind value, CopyMemory::Piece memory) {
    tasks_.emplace_back();
    const auto task = std::prev(tasks_.end());
    task->copied = std::move(value);
    task->memory = std::move(memory);
    if (step != Step::kFill) ++copying_;
    send_copy(task, step);
  }

  void send_copy(Tasks::iterator task, Step step) {
    task->step = step;
    task->op = step == Step::kReadBehind ? Op::kGet : task->copied->replaces ? Op::kPut : Op::kPutAbsent;
    IoExecutor& executor = step == Step::kWriteBehind ? backend_.far() : backend_.near();
    send(task, executor, task->op, {task->copied->key}, {{task->memory.bytes.get(), task->copied->nbytes}},
         kCopyTimeout, kCopyTimeout);
  }

  void read_behind(Tasks::iterator task, const Batch& batch) {
    if (batch.results()[0] == Status::kOk && !task->deleted) return send_copy(task, Step::kWriteBehind);
    if (!task->deleted) backend_.add(Count::kLost);
    drop(task);
  }

  void wrote_behind(Tasks::iterator task, const Batch& batch) {
    const Status status = batch.results()[0];
    far_failed_ = is_fault(status);
    if (is_found(status) && !task->deleted) {
      backend_.add(status == Status::kOk ? Count::kBehind : Count::kPresent);
    } else if (status == Status::kNoRoom) {
      backend_.add(Count::kRefused);
    } else if (is_fault(status) && !task->deleted) {
      backend_.add(Count::kFarFaults);
      retry_at_ = Clock::now() + kRetry;
      enqueue(std::move(*task->copied));
      return drop(task);
    }
    copied(task, backend_.far());
  }

  // The end of a copy; of a key that was deleted meanwhile, the copy is, too.
  void copied(Tasks::iterator task, IoExecutor& executor) {
    if (task->deleted) {
      try {
        executor.submit(Op::kDelete, {task->copied->key}, {}, kCopyTimeout);
      } catch (const std::runtime_error&) {  // closed
      }
    }
    drop(task);
  }

  // No batch of ours may use a buffer that goes away with this thread.
  void end() {
    for (const Task& task : tasks_) {
      if (task.batch != nullptr) task.batch->cancel();
    }
    for (Task& task : tasks_) {
      while (task.batch != nullptr && !task.batch->wait_until(Clock::now() + 1s)) {
      }
      for (Item& item : task.items) item.finish(item.stopped().value_or(Status::kCancelled));
    }
    tasks_.clear();
    behind_.clear();
  }

  NearFarBackend& backend_;
  const std::shared_ptr<Signal> signal_ = std::make_shared<Signal>();
  Tasks tasks_;
  std::deque<Behind> behind_;
  std::size_t copying_ = 0;               // tasks that copy far
  std::unordered_set<std::string> sent_;  // of values used twice: those that went into behind_
  Clock::time_point retry_at_{};
  bool far_failed_ = false;   // the last copy: the next one goes alone
  Clock::time_point told_{};  // the last byte that moved
  CopyMemory memory_{kCopiesNbytes};
};

}  // namespace

std::unique_ptr<IoThread> NearFarBackend::make_io_thread(unsigned) {
  return std::make_unique<NearFarThread>(*this);
}

void NearFarBackend::append_counters(Counters& counters) const {
  for (std::size_t i = 0; i < kCountCount; ++i) {
    counters.emplace_back(kNames[i], counts_[i].load(std::memory_order_relaxed));
  }
}

}  // namespace kvpool
