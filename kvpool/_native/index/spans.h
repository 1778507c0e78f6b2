// From which lengths of a prompt's prefix an engine could go on, where a group of its layers needs only the last
// blocks of a prefix, or has larger blocks than those that are hashed.
//
// Lengths are counted in hashed blocks. No locks: the owner of the table has one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
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

// The sets of holders at the ends of a prompt's blocks of `stride` hashed ones, neighbours with one set together. Read
// on demand: a prompt without holders costs one look.
class SetRuns {
 public:
  struct Run {
    SetId set;
    std::uint64_t end;  // of its last block, in blocks of the stride
  };

  SetRuns(const FlatMap& blocks, std::span<const std::byte> hashes, std::uint32_t stride);

  // Null: the prompt has no more of them. Holds until the next call.
  const Run* at(std::size_t index);

 private:
  static constexpr std::size_t kAhead = 16;

  std::uint64_t hash_at(std::uint64_t block) const;
  SetId next_set();

  const FlatMap* blocks_;
  std::span<const std::byte> hashes_;
  std::uint64_t stride_;
  std::uint64_t count_;      // blocks of the stride
  std::uint64_t read_ = 0;   // of them
  SetId waiting_ = kNobody;  // the set of block read_ - 1, which begins the next run
  std::vector<Run> runs_;
  std::array<FlatMap::Place, kAhead> places_;
};

}  // namespace kvpool
