// A near pool before a far one: an executor in front of two others, whose items it forwards.
//
// - Gets, touches and lookups ask near, and far for what near lacks; kNear says what near had. What a get found far is
//   copied near, without delaying the get: its bytes are copied first.
// - Puts go near, and far behind them: a queue of keys, whose values are read from near again. Without near they go
//   far at once.
// - Deletes and expiries go to both.
// - A lookup that prefetches asks near, and copies near what only far has; its items end behind their copies.
//
// Either may be dead. A fault near is a miss near. A fault far fails gets and puts that need far; of presence it is a
// miss, so that what near has stays useful.
//
// One thread forwards all. Copies take at most kCopiesNbytes of memory, or one record; without room a value that was
// got is not copied near (counted), and others wait: in the queue to far, which drops the oldest of kMaxBehind keys
// (counted), and among at most kMaxAhead to be prefetched.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "store/io_executor.h"

namespace kvpool {

inline constexpr std::size_t kCopiesNbytes = std::size_t{64} << 20;
inline constexpr std::size_t kMaxBehind = 65'536;
inline constexpr std::size_t kMaxAhead = 65'536;

class NearFarBackend : public Backend {
 public:
  enum class Count : std::uint8_t {
    kNearHits,    // values that gets read near
    kFarHits,     // and far
    kFilled,      // copied near after a get
    kPrefetched,  // and before one
    kNotFilled,   // for lack of memory, or of room near
    kBehind,      // copied far behind their put
    kPresent,     // far had them
    kLost,        // evicted near, or dropped from the queue, before they were copied
    kRefused,     // no room far
    kNearFaults,
    kFarFaults,
    kWaiting,  // on their way far; no total
  };
  static constexpr std::size_t kCountCount = 12;

  // `all`: every put value goes far; else what is used a second time.
  NearFarBackend(std::shared_ptr<IoExecutor> near, std::shared_ptr<IoExecutor> far, bool all)
      : near_(std::move(near)), far_(std::move(far)), all_(all) {}

  // Called once: an executor with one I/O thread.
  std::unique_ptr<IoThread> make_io_thread(unsigned index) override;
  void append_counters(Counters& counters) const override;

  IoExecutor& near() { return *near_; }
  IoExecutor& far() { return *far_; }
  bool all() const { return all_; }
  void add(Count count) { counts_[static_cast<std::size_t>(count)].fetch_add(1, std::memory_order_relaxed); }
  void set_waiting(std::size_t keys) {
    counts_[static_cast<std::size_t>(Count::kWaiting)].store(keys, std::memory_order_relaxed);
  }

 private:
  const std::shared_ptr<IoExecutor> near_;
  const std::shared_ptr<IoExecutor> far_;
  const bool all_;
  std::array<std::atomic<std::uint64_t>, kCountCount> counts_{};
};

}  // namespace kvpool
