// The shards of a far pool: what waits for each, and what each may be sent now (its states: near_far.h). One thread.
//
// Keys belong to the shard that had them when they came; what waits is looked at again before it is sent.
#pragma once

#include <algorithm>
#include <cstddef>
#include <list>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "store/io_executor.h"
#include "store/near_far/copy_memory.h"
#include "store/near_far/task.h"

namespace kvpool {

// A copy near that items of lookups wait for.
struct Wish {
  Copy copy;
  std::vector<Item> items;
};

struct Shard {
  enum class State : std::uint8_t { kSending, kPaused, kAsked };

  // Copies under way to it: more bytes would fill its connections' own queues, for which all shards wait a moment.
  static constexpr std::size_t kMostNbytes = std::size_t{8} << 20;
  static constexpr unsigned kMostCopies = 256;

  State state = State::kSending;
  bool goes_alone = false;  // one copy at a time, until one was taken
  unsigned faults = 0;      // since a copy was taken
  Clock::time_point paused_until{};
  std::list<Copy> waiting;    // the oldest first
  unsigned copying = 0;       // tasks that copy to it
  CopyMemory::Holder behind;  // theirs

  std::unordered_map<std::string, Use> uses;  // to be told
  Clock::time_point tell_at{};                // the first of them
  bool is_told = false;                       // some, right now
  Clock::duration span{};                     // between two uses of a key that are told
  Clock::time_point lengthens_at{};           // unless far loses what it had

  std::list<Wish> ahead;
  unsigned asking = 0;  // tasks that read ahead from it, or ask it
  CopyMemory::Holder ahead_memory;

  bool may_copy(std::size_t nbytes, const CopyMemory& memory) const {
    if (state != State::kSending || copying >= (goes_alone ? 1 : kMostCopies)) return false;
    return (behind.nbytes == 0 || behind.nbytes + nbytes <= kMostNbytes) && memory.has_room(behind, nbytes);
  }
  // A fault that may be its own.
  void failed(Clock::time_point now) {
    if (state == State::kPaused) return;  // one fault ends all that was under way
    const auto pause = kFirstPause * (1U << std::min(faults++, 6U));
    paused_until = now + std::min<Clock::duration>(pause, kLongestPause);
    state = State::kPaused;
  }
  void answered() {
    if (state != State::kSending) goes_alone = true;
    state = State::kSending;
  }
  void took() {
    faults = 0;
    goes_alone = false;
  }
  bool is_idle() const {
    return state == State::kSending && faults == 0 && waiting.empty() && copying == 0 && uses.empty() &&
           !is_told && ahead.empty() && asking == 0;
  }

 private:
  static constexpr Clock::duration kFirstPause = std::chrono::milliseconds(100);
  static constexpr Clock::duration kLongestPause = std::chrono::seconds(5);
};

class Shards {
 public:
  explicit Shards(IoExecutor& far) : far_(far) {}

  // The key's, now. Valid until remove_idle(); for_each() may go on.
  Shard& of(std::string_view key) { return shards_[far_.shard_of(key)]; }
  // Whether the key still belongs to `shard`.
  bool holds(const Shard& shard, std::string_view key) { return &of(key) == &shard; }
  template <typename Call>
  void for_each(Call call) {
    for (auto& [name, shard] : shards_) call(shard);
  }
  std::size_t size() const { return shards_.size(); }
  // Servers go. What is known of a shard that comes back is learned again.
  void remove_idle() {
    if (shards_.size() > kKept) std::erase_if(shards_, [](const auto& one) { return one.second.is_idle(); });
  }

 private:
  static constexpr std::size_t kKept = 1024;

  IoExecutor& far_;
  std::map<std::string, Shard> shards_;
};

}  // namespace kvpool
