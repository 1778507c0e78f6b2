// Counts ends of connections with a record under way, and lengthens the pauses between trials.
#include "store/refused_size.h"

#include <algorithm>
#include <utility>

namespace kvpool {
namespace {

using namespace std::chrono_literals;

// The least value of both limits is 1 MiB; a command's other bytes count.
constexpr std::size_t kLeastLimitNbytes = 1'000'000;
constexpr auto kFirstPause = 1s;
constexpr auto kLongestPause = 64s;

}  // namespace

std::string RefusedSize::why(std::size_t nbytes, Clock::time_point now) {
  if (nbytes < nbytes_.load(std::memory_order_relaxed)) return {};
  const std::lock_guard lock(mutex_);
  if (times_ < 2) return {};
  if (now < until_) return words_;
  is_tried_ = true;
  until_ = now + kFirstPause;  // the others wait for it
  return {};
}

void RefusedSize::ended(std::size_t nbytes, std::string words, bool said, Clock::time_point now) {
  if (!said && nbytes < kLeastLimitNbytes) return;
  const std::lock_guard lock(mutex_);
  if (nbytes < nbytes_.load(std::memory_order_relaxed)) nbytes_.store(nbytes, std::memory_order_relaxed);
  words_ = std::move(words);
  // Several connections end for one reason: only the end of a trial makes the pause longer.
  if (times_ >= 2 && !std::exchange(is_tried_, false)) return;
  times_ = std::max(times_ + 1, said ? 2U : 1U);
  const unsigned doublings = std::clamp(times_, 2U, 8U) - 2;
  if (times_ >= 2) until_ = now + std::min<Clock::duration>(kFirstPause * (1U << doublings), kLongestPause);
}

void RefusedSize::moved(std::size_t nbytes) {
  if (nbytes >= nbytes_.load(std::memory_order_relaxed)) forget();
}

void RefusedSize::forget() {
  if (nbytes_.load(std::memory_order_relaxed) == SIZE_MAX) return;
  const std::lock_guard lock(mutex_);
  nbytes_.store(SIZE_MAX, std::memory_order_relaxed);
  times_ = 0;
  is_tried_ = false;
}

}  // namespace kvpool
