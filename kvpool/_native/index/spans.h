// Prefix lengths from which an engine could go on, for groups that need only a prefix's last blocks or have
// larger blocks.
//
// Lengths are counted in hashed blocks. No locks: the owner of the table has one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <stdexcept>
#include <vector>

#include "index/flatmap.h"
#include "index/holders.h"

namespace kvpool {

// Every length from first to last.
struct Span {
  std::uint64_t first;
  std::uint64_t last;
};

// Rising and disjoint.
using Spans = std::vector<Span>;

// Intersects `spans` with `others`.
void keep_common(Spans& spans, const Spans& others);

// The greatest multiple of `unit` in a span; 0: none.
std::uint64_t longest(const Spans& spans, std::uint64_t unit);

// Adds the lengths from which a group with blocks from `begin` up to `end`, each of `stride` hashed blocks,
// could go on. A prefix needs the last `last` of its blocks, 0: all.
void add_held(Spans& spans, std::uint64_t begin, std::uint64_t end, std::uint32_t last, std::uint32_t stride);

// Throws std::invalid_argument for circular hashes, which no hash chain has. Each hash at 2^k - 1 is compared
// with the 2^k that follow (Brent): finds circles shorter than half of the prompt. 3 us for 8,192.
void check_circles(std::span<const std::byte> hashes);

// A match would take longer than others should wait for it.
struct TooMuchWork : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A match would hold an event loop too long, or waits for a batch: ask in a thread.
class NotAtOnce : public std::runtime_error {
 public:
  NotAtOnce() : std::runtime_error("the table does not answer this at once") {}
};

// How long a match may take. kAtOnce: for an event loop: short, and waits for no lock.
enum class Patience : std::uint8_t { kFull, kAtOnce };

// Runs of equal holder sets at the ends of a prompt's blocks of `stride` hashed ones. Read on demand: a
// prompt without holders costs one look.
class SetRuns {
 public:
  struct Run {
    SetId set;
    std::uint64_t begin;  // its first block, in blocks of the stride
  };

  SetRuns(const FlatMap& blocks, std::span<const std::byte> hashes, std::uint32_t stride);

  std::uint64_t count() const { return count_; }  // blocks of the stride
  // Null: behind the last run. Valid until the next call.
  const Run* at(std::size_t index);
  // The number of the run with this block, below count().
  std::size_t index_of(std::uint64_t block);

 private:
  static constexpr std::size_t kAhead = 16;

  bool read_next();

  const FlatMap* blocks_;
  std::span<const std::byte> hashes_;
  std::uint64_t stride_;
  std::uint64_t count_;
  std::uint64_t read_ = 0;  // of them
  std::vector<Run> runs_;
  std::array<FlatMap::Place, kAhead> places_;
};

class Walk {
 public:
  // Looks at a holder: 40 to 60 ms. A prompt of 8,192 blocks at 1,000 workers that drop out singly takes a sixtieth.
  static constexpr std::uint64_t kMaxLooks = std::uint64_t{1} << 25;
  // About 1 ms.
  static constexpr std::uint64_t kMaxLooksAtOnce = std::uint64_t{1} << 19;

  Walk(const FlatMap& blocks, std::span<const std::byte> hashes, Patience patience)
      : blocks_(&blocks),
        hashes_(hashes),
        runs_(blocks, hashes, 1),
        patience_(patience),
        looks_left_(patience == Patience::kAtOnce ? kMaxLooksAtOnce : kMaxLooks) {}

  std::uint64_t count() const { return runs_.count(); }
  SetRuns& runs(std::uint32_t stride);
  // Before so many looks at holders. Throws TooMuchWork; kAtOnce: NotAtOnce.
  void spend(std::uint64_t looks) {
    if (looks > looks_left_) refuse();
    looks_left_ -= looks;
  }

 private:
  [[noreturn]] void refuse() const;

  const FlatMap* blocks_;
  std::span<const std::byte> hashes_;
  SetRuns runs_;
  std::map<std::uint32_t, SetRuns> larger_;  // by stride
  Patience patience_;
  std::uint64_t looks_left_;
};

}  // namespace kvpool
