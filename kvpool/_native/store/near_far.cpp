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
#include <unordered_map>
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
    "near_hits",      "far_hits", "filled",         "prefetched",  "not_filled", "behind",
    "behind_present", "lost",     "refused_behind", "near_faults", "far_faults", "behind_waiting"};

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

// Items under way in one batch, or a copy: of our own, or one that items of lookups wait for.
struct Task {
  enum class Step : std::uint8_t { kNear, kFar, kReadAhead, kFill, kReadBehind, kWriteBehind };

  Step step = Step::kNear;
  Op op = Op::kGet;
  std::vector<Item> items;           // of a copy of our own: none
  std::vector<Status> found;         // by item: what near said to a delete or an expiry
  std::optional<Behind> copied;      // of a copy
  CopyMemory::Piece memory;          // of a copy
  bool deleted = false;              // one of its keys, meanwhile: nothing of it is copied near, or stays
  std::vector<std::string> deletes;  // the keys of a delete
  std::shared_ptr<Batch> batch;
};

class NearFarThread : public IoThread {
 public:
  explicit NearFarThread(NearFarBackend& backend) : backend_(backend) {}

  void wake() noexcept override { signal_->set(); }

  void run(Source& source) override {
    while (!source.closing()) {
      if (tasks_.empty() && behind_.empty() && ahead_.empty()) {
        std::optional<Item> item = source.next();
        if (!item) break;
        std::vector<Item> taken;
        taken.push_back(std::move(*item));
        start(std::move(taken));
      }
      take(source);
      advance();
      copy_behind();
      copy_ahead();
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
  using Wanted = std::unordered_map<std::string, Tasks::iterator>;

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
      if (item.op() == Op::kDelete) {
        deleted.insert(item.key().text);
        deleting_.insert(item.key().text);
        tasks_.back().deletes.push_back(item.key().text);
      } else if (deleting_.contains(item.key().text)) {
        tasks_.back().deleted = true;
      }
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
    finish_all(*task, Status::kFault, refusal);
    if (task->step == Step::kFill) backend_.add(Count::kNotFilled);
    if (is_behind(*task)) backend_.add(Count::kLost);
    drop(task);
  }

  static bool is_behind(const Task& task) {
    return task.step == Step::kReadBehind || task.step == Step::kWriteBehind;
  }

  static bool all_stopped(const Task& task) {
    return std::all_of(task.items.begin(), task.items.end(),
                       [](const Item& item) { return item.stopped().has_value(); });
  }

  static void finish_all(Task& task, Status status, const std::string& error = "") {
    for (Item& item : task.items) item.finish(item.stopped().value_or(status), error);
    task.items.clear();
  }

  void drop(Tasks::iterator task) {
    if (is_behind(*task)) --copying_;
    for (const std::string& key : task->deletes) deleting_.erase(deleting_.find(key));
    if (const auto wanted = is_wanted(*task)) wanted_.erase(*wanted);
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
        if (all_stopped(*here)) here->batch->cancel();
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
      case Step::kReadAhead:
        return read_ahead(task, *batch);
      case Step::kFill:
        return filled(task, *batch);
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
      } else if (item.prefetch_nbytes() != 0) {
        if (status == Status::kMiss && !task->deleted) {
          prefetch(std::move(item));
        } else {
          item.finish(is_found(status) ? Status::kPresent : status, batch.error().value_or(""));
        }
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
        item.finish(is_put(item.op()) ? status : Status::kNear);
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
        if (!task->deleted) fill(item);
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

  // A copy that is to come, or under way, of what is asked for now.
  void prefetch(Item item) {
    const auto [wanted, is_new] = wanted_.try_emplace(item.key().text);
    if (is_new) {
      if (wanted_.size() > kMaxAhead) {
        wanted_.erase(wanted);
        backend_.add(Count::kNotFilled);
        return item.finish(Status::kNoRoom);
      }
      Task& task = ahead_.emplace_back();
      task.step = Step::kReadAhead;
      task.copied = {item.key(), item.prefetch_nbytes(), false};
      wanted->second = std::prev(ahead_.end());
    }
    wanted->second->items.push_back(std::move(item));
  }

  std::optional<Wanted::iterator> is_wanted(const Task& task) {
    if (!task.copied) return std::nullopt;
    const auto found = wanted_.find(task.copied->key.text);
    if (found == wanted_.end() || &*found->second != &task) return std::nullopt;
    return found;
  }

  void copy_ahead() {
    if (Clock::now() >= look_ahead_at_) {
      look_ahead_at_ = Clock::now() + kLook;
      std::erase_if(ahead_, [this](Task& task) {
        if (!all_stopped(task)) return false;
        finish_all(task, Status::kCancelled);
        wanted_.erase(task.copied->key.text);
        return true;
      });
    }
    while (!ahead_.empty() && tasks_.size() < kMaxTasks && memory_.has_room(ahead_.front().copied->nbytes)) {
      const auto task = ahead_.begin();
      task->memory = memory_.get(task->copied->nbytes);
      tasks_.splice(tasks_.end(), ahead_, task);
      send_copy(task, Step::kReadAhead);
    }
  }

  void read_ahead(Tasks::iterator task, const Batch& batch) {
    const Status status = batch.results()[0];
    if (status == Status::kOk && !task->deleted) return send_copy(task, Step::kFill);
    if (was_joined_late(*task, status)) return send_copy(task, Step::kReadAhead);
    if (is_fault(status) && status != Status::kCancelled && !all_stopped(*task)) {
      backend_.add(Count::kFarFaults);
    }
    finish_all(*task, task->deleted ? Status::kMiss : status, batch.error().value_or(""));
    drop(task);
  }

  // Cancelled for callers that had all given up, and then another one joined: it is copied for that one.
  static bool was_joined_late(const Task& task, Status status) {
    return status == Status::kCancelled && !task.deleted && !all_stopped(task);
  }

  void filled(Tasks::iterator task, const Batch& batch) {
    if (was_joined_late(*task, batch.results()[0])) return send_copy(task, Step::kFill);
    const bool is_near = is_found(batch.results()[0]);
    backend_.add(!is_near ? Count::kNotFilled : task->items.empty() ? Count::kFilled : Count::kPrefetched);
    // Also of a lookup that was given up: its caller counts what came near.
    const Status status = task->deleted ? Status::kMiss : is_near ? Status::kOk : Status::kNoRoom;
    for (Item& item : task->items) item.finish(status);
    task->items.clear();
    copied(task, backend_.near());
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

  // A deleted key is not copied any more, nor is what was found of it before.
  void forget(const std::unordered_set<std::string>& keys) {
    std::erase_if(behind_, [&](const Behind& value) { return keys.contains(value.key.text); });
    for (const std::string& key : keys) sent_.erase(key);
    for (Task& task : tasks_) {
      const auto is_deleted = [&](const Item& item) { return keys.contains(item.key().text); };
      task.deleted = task.deleted || (task.copied && keys.contains(task.copied->key.text)) ||
                     (!task.copied && std::any_of(task.items.begin(), task.items.end(), is_deleted));
    }
    std::erase_if(ahead_, [&](Task& task) {
      if (!keys.contains(task.copied->key.text)) return false;
      finish_all(task, Status::kMiss);
      wanted_.erase(task.copied->key.text);
      return true;
    });
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
    task->step = step;
    if (is_behind(*task)) ++copying_;
    send_copy(task, step);
  }

  void send_copy(Tasks::iterator task, Step step) {
    task->step = step;
    const bool reads = step == Step::kReadBehind || step == Step::kReadAhead;
    task->op = reads ? Op::kGet : task->copied->replaces ? Op::kPut : Op::kPutAbsent;
    const bool asks_far = step == Step::kWriteBehind || step == Step::kReadAhead;
    IoExecutor& executor = asks_far ? backend_.far() : backend_.near();
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
      finish_all(task, Status::kCancelled);
    }
    for (Task& task : ahead_) finish_all(task, Status::kCancelled);
    wanted_.clear();
    ahead_.clear();
    deleting_.clear();
    tasks_.clear();
    behind_.clear();
  }

  NearFarBackend& backend_;
  const std::shared_ptr<Signal> signal_ = std::make_shared<Signal>();
  Tasks tasks_;
  Tasks ahead_;    // copies to come that lookups wait for
  Wanted wanted_;  // by key: those, and the ones under way
  Clock::time_point look_ahead_at_{};
  std::unordered_multiset<std::string> deleting_;
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
