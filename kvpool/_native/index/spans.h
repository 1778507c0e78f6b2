// From which lengths of a prompt's prefix an engine could go on, where a group of its layers needs only the last
// blocks of a prefix, or has larger blocks than those that are hashed.
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

// Rising and apart from each other.
using Spans = std::vector<Span>;

// Leaves in `spans` what is in `others`, too.
void keep_common(Spans& spans, const Spans& others);

// The greatest multiple of `unit` in one of the spans; 0: none.
std::uint64_t longest(const Spans& spans, std::uint64_t unit);

// Adds what a group can go on from that holds its blocks from `begin` up to `end`, each as large as `stride` hashed
// ones: a prefix needs the last `last` of its blocks, 0: all of them.
void add_held(Spans& spans, std::uint64_t begin, std::uint64_t end, std::uint32_t last, std::uint32_t stride);

// Throws std::invalid_argument for a prompt that goes in circles, as no chain of hashes does: each hash at 2^k - 1 is
// compared with the 2^k that follow (Brent), so circles are found that are shorter than half of the prompt. 3 us for 8,192.
void check_circles(std::span<const std::byte> hashes);

// A match would take longer than others should wait for it.
class TooMuchWork : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A match would take longer than an event loop should be held up, or waits for a batch: it is to be asked in a thread.
class NotAtOnce : public std::runtime_error {
 public:
  NotAtOnce() : std::runtime_error("the table does not answer this at once") {}
};

// How long a match may take. kAtOnce: for an event loop, in which others wait for it; it waits for no lock either.
enum class Patience : std::uint8_t { kFull, kAtOnce };

// The sets of holders at the ends of a prompt's blocks of `stride` hashed ones, neighbours with one set together. Read
// on demand: a prompt without holders costs one look.
class SetRuns {
 public:
  struct Run {
    SetId set;
    std::uint64_t begin;  // its first block, in blocks of the stride
  };

  SetRuns(const FlatMap& blocks, std::span<const std::byte> hashes, std::uint32_t stride);

  std::uint64_t count() const { return count_; }  // blocks of the stride
  // Null: the prompt has no more of them. Holds until the next call.
  const Run* at(std::size_t index);
  // The number of the run that a block, below count(), is in.
  std::size_t index_of(std::uint64_t block);

 private:
  static constexpr std::size_t kAhead = 16;

  std::uint64_t hash_at(std::uint64_t block) const;
  bool read_next();

  const FlatMap* blocks_;
  std::span<const std::byte> hashes_;
  std::uint64_t stride_;
  std::uint64_t count_;
  std::uint64_t read_ = 0;  // of them
  std::vector<Run> runs_;
  std::array<FlatMap::Place, kAhead> places_;
};

// One prompt while it is matched.
class Walk {
 public:
  // So many looks at a holder take 40 to 60 ms. A prompt of 8,192 blocks at 1,000 workers that drop out one by one takes
  // a sixtieth of them.
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
  // Before so many holders are looked at. Throws TooMuchWork; kAtOnce: NotAtOnce.
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
