// A near pool before a far one: an executor in front of two others, whose items it forwards.
//
// An item:
//
//            there, or it was put                       there, put, or no fault can be told
//   near ─────────────────────────▶ ends      far ───────────────────────────────────────────▶ ends
//     │  missing, refused, fault;              ▲          (no answer about presence: a miss)
//     └──of a delete or an expiry: always──────┘
//
// A copy. What a get found far, or a lookup wants to have near, comes near; what was put near goes far:
//
//   a get far ──bytes──▶ fill ──▶ near                        a put near ──bytes, while far takes them──▶ write ──▶ far
//   a lookup ──waits by shard──▶ read far ──▶ fill            its key ──waits by shard──▶ read near ──────────▲
//
// A use. What is used near is used far: its keys wait by shard, each at most once in a span, and are touched there in
// batches. What far lacks is copied there from near again.
//
// A shard of far, which is what one failing server takes away:
//
//              a fault of its own, or of nobody's               its pause is over
//   sending ──────────────────────────────────────▶ paused ───────────────────────▶ asked for a key
//      ▲                                              ▲                               │        │
//      │                                              └──────────── a fault ──────────┘        │
//      └────────────────────────────── an answer; the next copy goes alone ────────────────────┘
//
// Pauses double until a copy was taken. A fault of a key alone (too large, no right) pauses nothing: the key leaves, and
// is counted, as one does for which far has no room; a use much later may send it again.
//
// Near never waits for far: an item that far has not answered holds none of the places of those near, memory of copies is
// divided so that no shard takes what others need (copy_memory.h), and no step waits for one event alone: each turn of
// the thread looks at what ended, what came, what may be sent and what is due (thread.cpp).
//
// Ownership: one thread, the executor's, owns tasks, queues, shards and memory. The two pools' threads touch a task's
// buffers until its batch is done, and tell of that through Ended. Counts are atomic.
//
// Parts: thread (the turns), items (callers' items), behind (copies and uses to far), ahead (copies near before a load),
// shards, uses, tasks, copy_memory, ended.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "store/io_executor.h"

namespace kvpool {

// Keys on their way far, of all shards; beyond, the oldest of the shard with the most of them is dropped.
inline constexpr std::size_t kMaxBehind = 65'536;

class NearFarBackend : public Backend {
 public:
  enum class Count : std::uint8_t {
    kNearHits,    // values that gets read near
    kFarHits,     // and far
    kFilled,      // copied near after a get
    kPrefetched,  // and before one
    kNotFilled,   // for lack of memory, or of room near
    kBehind,      // copied far
    kPresent,     // far had them
    kLost,  // evicted near, or dropped from the queue, before they were copied; or far failed with them too often
    kNoRoomFar,
    kRefused,  // by far, and no other key with them
    kNearFaults,
    kFarFaults,
    kUsesTold,     // keys used near that far has, too, and counts as used
    kUsesMissing,  // and that far lacks
    kUsesLost,     // that nobody told far: too many, or far is away
    kWaiting,      // on their way far; no total
  };
  static constexpr std::size_t kCountCount = 16;

  // `all`: every put value goes far; else what is used a second time. `far_ttl`: of a value that is not used far; zero:
  // no use is needed to keep it from that.
  NearFarBackend(std::shared_ptr<IoExecutor> near, std::shared_ptr<IoExecutor> far, bool all,
                 Clock::duration far_ttl = {})
      : near_(std::move(near)), far_(std::move(far)), all_(all), far_ttl_(far_ttl) {}

  // Called once: an executor with one I/O thread.
  std::unique_ptr<IoThread> make_io_thread(unsigned index) override;
  void append_counters(Counters& counters) const override;

  IoExecutor& near() { return *near_; }
  IoExecutor& far() { return *far_; }
  bool all() const { return all_; }
  Clock::duration far_ttl() const { return far_ttl_; }
  void add(Count count, std::size_t n = 1) {
    counts_[static_cast<std::size_t>(count)].fetch_add(n, std::memory_order_relaxed);
  }
  void set_waiting(std::size_t keys) {
    counts_[static_cast<std::size_t>(Count::kWaiting)].store(keys, std::memory_order_relaxed);
  }

 private:
  const std::shared_ptr<IoExecutor> near_;
  const std::shared_ptr<IoExecutor> far_;
  const bool all_;
  const Clock::duration far_ttl_;
  std::array<std::atomic<std::uint64_t>, kCountCount> counts_{};
};

}  // namespace kvpool
