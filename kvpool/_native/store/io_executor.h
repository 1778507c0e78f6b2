// Batches of keys and buffers, run by a fixed number of native threads; knows nothing of Python or of stores.
//
// Each thread owns one IoThread, made by the Backend (sockets: its connections; files: its own view of
// the shared counter). The I/O thread pulls Items from its Source, may have several in flight, and finishes each.
//
// Who owns what:
// - Core::mutex guards the queues, the deadlines, the puts that wait for another, and of each Batch `next_`, `waiting_`,
//   `error_` and its place in a queue. Nothing blocks under it.
// - Results of a batch: each byte is written once, by the thread that took the item (its I/O thread; or stop(), for items
//   that no I/O thread has taken; or finish() of the put that it waited for), and read only after done(). A lookup has one
//   result a record, which is the worst of its parts' and written atomically.
// - Buffers are borrowed from the caller until done(): a batch is done when no I/O thread touches them any more.
//
// A put of a key that some I/O thread is putting just now waits for that one's result instead of being a second
// transfer: a key names content. If the first is given up, one of those that wait takes its place.
//
// kPutAbsent asks whether the key is there, as kTouch does, and puts only what is missing. It ends as kOk when this
// item put the value, as kPresent when the value was there or another put of the key, which it waited for, put it.
//
// A lookup is a batch of keys that are spelled as I/O threads take them; it ends early where the rest is of no use (lookup.h).
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
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

enum class Op : std::uint8_t { kPut = 0, kGet = 1, kContains = 2, kDelete = 3, kTouch = 4, kPutAbsent = 5 };
inline constexpr std::size_t kOpCount = 6;

inline bool is_put(Op op) { return op == Op::kPut || op == Op::kPutAbsent; }
inline bool moves_bytes(Op op) { return is_put(op) || op == Op::kGet; }

enum class Status : std::uint8_t {
  kMiss = 0,
  kOk = 1,
  kNoRoom = 2,
  kFault = 3,
  kCancelled = 4,
  kTimedOut = 5,
  kPresent = 6,  // kPutAbsent: nothing had to be put
};
inline constexpr std::size_t kStatusCount = 7;

inline constexpr std::size_t kMaxQueuedItems = 1'048'576;
inline constexpr std::size_t kMaxTogether = 32;

struct Core;

class Batch {
 public:
  using Buffer = std::span<std::byte>;

  Batch(Op op, std::vector<Key> keys, std::vector<Buffer> buffers, Clock::time_point deadline);
  Batch(std::unique_ptr<Lookup> lookup, Clock::time_point deadline);

  // True when every item has its result and no thread touches a buffer any more. Cheap, never blocks.
  bool done() const { return done_.load(std::memory_order_acquire); }
  // Blocks until done() or until `until`; returns done().
  bool wait_until(Clock::time_point until);
  // Items that no I/O thread has taken are cancelled at once; an I/O thread stops its own at the next chunk.
  void cancel();

  // Only after done(). One a key; of a lookup one a record, kMiss for those that were not asked for.
  std::span<const Status> results() const { return results_; }
  std::optional<std::string> error() const { return error_; }

 private:
  friend struct Core;
  friend class Item;
  friend class IoExecutor;

  std::size_t item_count() const { return lookup_ ? lookup_->key_count() : keys_.size(); }
  void set_record(std::size_t record, Status status);

  const Op op_;
  const std::unique_ptr<Lookup> lookup_;  // else keys_
  const std::vector<Key> keys_;
  const std::vector<Buffer> buffers_;  // as many as keys if moves_bytes(op_), else none
  const Clock::time_point submitted_ = Clock::now();
  const Clock::time_point deadline_;
  std::shared_ptr<Core> core_;

  std::vector<Status> results_;
  std::optional<std::string> error_;
  std::size_t next_ = 0;                     // the first item that no I/O thread has taken
  std::unordered_set<std::size_t> waiting_;  // taken, and waiting for another put of their key
  bool queued_ = false;
  std::list<std::shared_ptr<Batch>>::iterator place_;  // in the queue, while queued_
  std::uint64_t sequence_ = 0;
  std::atomic<std::size_t> unfinished_;
  std::atomic<Status> stop_{Status::kOk};  // kCancelled or kTimedOut once the rest is to be given up
  std::atomic<bool> done_{false};
  std::condition_variable done_changed_;  // with Core::mutex
};

// One key of a batch, in the hands of one I/O thread. It must be finished; dropped, it is a fault and never a hang.
class Item {
 public:
  Item(std::shared_ptr<Batch> batch, std::size_t index) : batch_(std::move(batch)), index_(index) {}
  // Spells the key of a lookup: once, before key().
  void spell();
  Item(Item&&) noexcept = default;
  Item& operator=(Item&&) = delete;
  ~Item();

  Op op() const { return batch_->op_; }
  const Key& key() const { return spelled_ ? *spelled_ : batch_->keys_[index_]; }
  std::span<std::byte> buffer() const { return batch_->buffers_[index_]; }
  Clock::time_point deadline() const { return batch_->deadline_; }
  // What its batch was given in all.
  Clock::duration timeout() const { return batch_->deadline_ - batch_->submitted_; }
  // kCancelled or kTimedOut when the item is to be given up; asked between chunks.
  std::optional<Status> stopped() const;
  // Ends the item: its buffer must not be touched after this.
  void finish(Status status, std::string error = {});

 private:
  std::shared_ptr<Batch> batch_;
  std::size_t index_;
  std::unique_ptr<const Key> spelled_;  // of a lookup
};

// Where an I/O thread gets its items: lookups before loads before stores, each in order of arrival; but long lookups take turns
// with others.
class Source {
 public:
  explicit Source(Core& core) : core_(core) {}
  // Blocks until there is an item; nothing once the executor closes.
  std::optional<Item> next();
  // Never blocks: for an I/O thread that has items in flight and room for more. Appends the next item to `items`, and up to
  // kMaxTogether while they move no bytes: these cost little beside the lock. False: there is none, or only puts and
  // `puts_too` is false.
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
  // Called from other threads when items arrived or were stopped, for I/O threads that wait in a poll() of their own.
  virtual void wake() noexcept {}
};

using Counters = std::vector<std::pair<std::string, std::uint64_t>>;

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::unique_ptr<IoThread> make_io_thread(unsigned index) = 0;
  // Appends the backend's own counters. Called from any thread.
  virtual void append_counters(Counters& counters) const = 0;
};

class IoExecutor {
 public:
  // Starts `threads` I/O threads and one thread for deadlines. Throws what the backend's I/O threads throw.
  IoExecutor(std::unique_ptr<Backend> backend, unsigned threads);
  IoExecutor(const IoExecutor&) = delete;
  IoExecutor& operator=(const IoExecutor&) = delete;
  // Closes; a thread that cannot be joined in time is left to itself with all it needs.
  ~IoExecutor();

  // Never blocks. Throws std::runtime_error when closed, full, or in a forked child: threads do not survive
  // fork(), so an executor belongs to the process that made it.
  std::shared_ptr<Batch> submit(Op op, std::vector<Key> keys, std::vector<Batch::Buffer> buffers,
                                Clock::duration timeout);

  // As submit(). A lookup of any length counts as one item that waits.
  std::shared_ptr<Batch> submit(std::unique_ptr<Lookup> lookup, Clock::duration timeout);

  Counters counters() const;
  // Cancels everything, then joins. False: some thread is still busy; call again.
  bool close(Clock::duration timeout);
  // In a forked child the threads are gone and the locks are in any state.
  bool forked() const;

 private:
  std::shared_ptr<Batch> submit(std::shared_ptr<Batch> batch);

  std::shared_ptr<Core> core_;
};

}  // namespace kvpool
