// Batches of keys and buffers, run by a fixed number of native threads; independent of Python and of stores.
//
// Each thread owns one IoThread from the Backend (sockets: its connections; files: its view of the shared
// counts). The I/O thread pulls Items from its Source, may have several in flight, and finishes each.
//
// Ownership:
// - Core::mutex guards the queues, the deadlines, waiting puts, and of each Batch `next_`, `waiting_`, `error_`
//   and its place in a queue. Nothing blocks under it.
// - Results of a batch: the thread that took an item writes its byte once (its I/O thread; stop(), for untaken
//   items; or finish() of the awaited put); callers read after done(). A lookup has a result per record, its
//   parts' worst, written atomically.
// - Buffers belong to the batch until done(): then no I/O thread touches them any more.
//
// A put waits for another put of its key in flight and takes its result: a key names content. If that put is
// given up, a waiting put takes its place.
//
// kPutAbsent tests presence, as kTouch, and puts only absent values. It ends as kOk when this item put the
// value, as kPresent when it was present or the awaited put of the key stored it.
//
// kExpire lets a present value go soon: a server shortens its time to live, files are evicted first. A later use
// renews it.
//
// A batch has a time without progress, and one in all: a long queue on a slow link is no silent server. A byte that
// moves is progress: of a server's connection for all that it carries, of the store for what waits in its queues.
//
// A lookup is a batch of keys spelled when taken; it ends early once the rest is useless (lookup.h). One that
// prefetches has kOk for what was copied near, kPresent for what was there.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "key/record.h"
#include "store/lookup.h"

namespace kvpool {

using Clock = std::chrono::steady_clock;

enum class Op : std::uint8_t {
  kPut = 0,
  kGet = 1,
  kContains = 2,
  kDelete = 3,
  kTouch = 4,
  kPutAbsent = 5,
  kExpire = 6,
};
inline constexpr std::size_t kOpCount = 7;

inline bool is_put(Op op) { return op == Op::kPut || op == Op::kPutAbsent; }
inline bool moves_bytes(Op op) { return is_put(op) || op == Op::kGet; }

enum class Status : std::uint8_t {
  kMiss = 0,
  kOk = 1,
  kNoRoom = 2,
  kFault = 3,
  kCancelled = 4,
  kTimedOut = 5,
  kPresent = 6,  // kPutAbsent: present already
  kNear = 7,     // kOk of a get or a question of presence, of the nearer of two pools
  kRefused = 8,  // a fault of this key alone (too large, no right to it), whatever else is asked
};
inline constexpr std::size_t kStatusCount = 9;

// The cause of a kFault. kStore: the part of the store that has the key fails, for every key. kUnknown: a connection
// ended or time ran out, which may be this key's fault.
enum class Blame : std::uint8_t { kUnknown, kStore };

// What a store learned of a present value, for who copies it on. The seal is the record's own: a copy that is put
// with it is not hashed again, and is no valid record should its bytes have changed in between. Of a new value it has
// the writer alone.
struct Found {
  std::size_t nbytes = 0;  // of its payload; 0: unknown
  std::optional<Seal> seal;
  std::optional<Clock::time_point> used_at = {};  // of an item that is forwarded
};

inline constexpr std::size_t kMaxQueuedItems = 1'048'576;
inline constexpr std::size_t kMaxTogether = 32;

struct Core;

class Batch {
 public:
  using Buffer = std::span<std::byte>;

  // Ends `timeout` after the last progress, or `longest` after now; without progress at least `timeout` after now.
  // `known`: of the value of a put, one for each key; none: no writer is named.
  Batch(Op op, std::vector<Key> keys, std::vector<Buffer> buffers, Clock::duration timeout,
        Clock::duration longest, std::vector<Found> known = {});
  Batch(std::unique_ptr<Lookup> lookup, Clock::duration timeout);

  // True when every item has its result and no thread touches a buffer. Cheap, never blocks.
  bool done() const { return done_.load(std::memory_order_acquire); }
  // Blocks until done() or until `until`; returns done().
  bool wait_until(Clock::time_point until);
  // Cancels untaken items at once; I/O threads stop theirs at the next chunk.
  void cancel();
  // Cancelled, or out of time: only items that threads have taken are still to end.
  bool given_up() const { return stop_.load(std::memory_order_relaxed) != Status::kOk; }

  // Only after done(). A status per key; of a lookup per record, kMiss for skipped ones.
  std::span<const Status> results() const { return results_; }
  std::optional<std::string> error() const { return error_; }
  // Of the error.
  Blame blame() const { return blame_; }
  // Of key `index`: what the store learned of its value, where it is there; a lookup learns nothing.
  const Found& found(std::size_t index) const { return found_[index]; }

 private:
  friend struct Core;
  friend class Item;
  friend class IoExecutor;

  std::size_t item_count() const { return lookup_ ? lookup_->key_count() : keys_.size(); }
  void set_record(std::size_t record, Status status);
  // The first error. Under the lock.
  void fail(std::string error, Blame blame) {
    error_ = std::move(error);
    blame_ = blame;
  }
  // Its deadline, if `moved_at` was the last progress.
  Clock::time_point due(Clock::time_point moved_at) const {
    return std::min(last_, std::max(submitted_, moved_at) + timeout_);
  }

  const Op op_;
  const std::unique_ptr<Lookup> lookup_;  // else keys_
  const std::vector<Key> keys_;
  const std::vector<Buffer> buffers_;  // a buffer per key if moves_bytes(op_), else none
  const Clock::time_point submitted_ = Clock::now();
  const Clock::duration timeout_;
  const Clock::time_point last_;
  std::shared_ptr<Core> core_;
  std::function<void()> on_done_;

  std::vector<Status> results_;
  std::optional<std::string> error_;
  Blame blame_ = Blame::kUnknown;
  std::vector<Found> found_;                 // a key each; written as results_
  std::size_t next_ = 0;                     // the first untaken item
  std::unordered_set<std::size_t> waiting_;  // taken, and waiting for another put of the key
  bool queued_ = false;
  std::list<std::shared_ptr<Batch>>::iterator place_;  // in the queue, while queued_
  std::uint64_t sequence_ = 0;
  Clock::time_point timer_;  // its place in Core::deadlines
  std::atomic<std::size_t> unfinished_;
  std::atomic<Status> stop_{Status::kOk};  // kCancelled or kTimedOut: give up the rest
  std::atomic<bool> done_{false};
  std::condition_variable done_changed_;  // with Core::mutex
};

// One key of a batch, owned by one I/O thread. Finish it: a dropped item is a fault, never a hang.
class Item {
 public:
  Item(std::shared_ptr<Batch> batch, std::size_t index) : batch_(std::move(batch)), index_(index) {}
  // Spells the key of a lookup: once, before key().
  void spell();
  Item(Item&&) noexcept = default;
  Item& operator=(Item&&) = delete;
  ~Item();

  Op op() const { return batch_->op_; }
  bool is_of_batch(const Item& other) const { return batch_ == other.batch_; }
  const Key& key() const { return spelled_ ? *spelled_ : batch_->keys_[index_]; }
  std::span<std::byte> buffer() const { return batch_->buffers_[index_]; }
  // When its batch was submitted, and each key a microsecond before the one in front of it: of a prompt's blocks, the later
  // ones are of no use without the first ones. A forwarded item keeps it.
  Clock::time_point used_at() const;
  // Of a lookup that prefetches; else 0.
  std::size_t prefetch_nbytes() const {
    return batch_->lookup_ ? batch_->lookup_->prefetch_nbytes(index_) : 0;
  }
  Clock::time_point deadline(Clock::time_point moved_at = {}) const { return batch_->due(moved_at); }
  // The time given to its batch without progress.
  Clock::duration timeout() const { return batch_->timeout_; }
  // kCancelled or kTimedOut: give up the item. Check between chunks. `moved_at`: when its connection moved a byte;
  // else, when any I/O thread did.
  std::optional<Status> stopped(Clock::time_point moved_at) const;
  std::optional<Status> stopped() const;
  // A byte moved.
  void moved(Clock::time_point now) const;
  // Of the record that is put.
  Seal seal() const { return batch_->found_[index_].seal.value_or(Seal{}); }
  // Tells the batch's owner what is known of the value. Before finish().
  void tell(const Found& found) const {
    if (batch_->lookup_) return;
    Found& known = batch_->found_[index_];
    known = {found.nbytes, found.seal, known.used_at};
  }
  // Ends the item; its buffer must not be touched afterwards. `blame`: of the error.
  void finish(Status status, std::string error = {}, Blame blame = Blame::kUnknown);

 private:
  std::shared_ptr<Batch> batch_;
  std::size_t index_;
  std::unique_ptr<const Key> spelled_;  // of a lookup
};

// An I/O thread's items: lookups before loads before stores, each in order; long lookups take turns.
class Source {
 public:
  explicit Source(Core& core) : core_(core) {}
  // Blocks for an item; nothing once the executor closes.
  std::optional<Item> next();
  // Never blocks: for an I/O thread with items in flight and room for more. Appends the next item to `items`,
  // and up to kMaxTogether that move no bytes: these cost little beside the lock. False: no item, or only
  // puts and `puts_too` is false.
  bool try_take(std::vector<Item>& items, bool puts_too);
  bool closing() const;

 private:
  Core& core_;
};

class IoThread {
 public:
  virtual ~IoThread() = default;
  // Serves items until source.next() returns nothing. An exception is a fault of the items in flight; the
  // executor then calls run() again.
  virtual void run(Source& source) = 0;
  // Called by other threads for new or stopped items, to interrupt the I/O thread's own poll().
  virtual void wake() noexcept {}
};

using Counters = std::vector<std::pair<std::string, std::uint64_t>>;

// Damaged records of a backend, by damage. Any thread.
class DamageCounts {
 public:
  void add(Damage damage) {
    counts_[static_cast<std::size_t>(damage)].fetch_add(1, std::memory_order_relaxed);
  }
  void append(Counters& counters) const;

 private:
  std::array<std::atomic<std::uint64_t>, kDamageCount> counts_{};
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::unique_ptr<IoThread> make_io_thread(unsigned index) = 0;
  // Appends the backend's own counters. Any thread.
  virtual void append_counters(Counters& counters) const = 0;
  // The name of the part of the store that the key lives in now: what one failing server takes away. A store of one
  // part has no names. Any thread; never blocks.
  virtual std::string shard_of(std::string_view /*key*/) const { return {}; }
};

class IoExecutor {
 public:
  // Starts `threads` I/O threads and a thread for deadlines. Throws the backend's exceptions.
  IoExecutor(std::unique_ptr<Backend> backend, unsigned threads);
  IoExecutor(const IoExecutor&) = delete;
  IoExecutor& operator=(const IoExecutor&) = delete;
  // Closes; a thread that does not end in time is leaked with its state.
  ~IoExecutor();

  // Never blocks. Throws std::runtime_error when closed, full, or in a forked child, which has no threads.
  // `on_done`: called by a thread of the executor, under its lock: it must not throw, block or call the executor.
  // `known`: as Batch's.
  std::shared_ptr<Batch> submit(Op op, std::vector<Key> keys, std::vector<Batch::Buffer> buffers,
                                Clock::duration timeout,
                                std::optional<Clock::duration> longest = std::nullopt,
                                std::function<void()> on_done = {}, std::vector<Found> known = {});

  // As submit(). A lookup of any length counts as one waiting item.
  std::shared_ptr<Batch> submit(std::unique_ptr<Lookup> lookup, Clock::duration timeout);

  Counters counters() const;
  std::string shard_of(std::string_view key) const;
  // When any I/O thread last moved a byte.
  Clock::time_point moved_at() const;
  // Cancels everything, then joins. False: a thread is still busy; call again.
  bool close(Clock::duration timeout);
  // A forked child has no threads, and locks in any state.
  bool forked() const;

 private:
  std::shared_ptr<Batch> submit(std::shared_ptr<Batch> batch);

  std::shared_ptr<Core> core_;
};

}  // namespace kvpool
