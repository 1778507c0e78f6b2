// The keys of a lookup for a prompt's leading records. Keys are spelled when sent; misses decide which are
// still worth asking. Independent of executors and I/O threads.
//
// Ownership: everything is constant except `end_tokens_`, which any thread may lower. Only key() reads the
// hashes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

#include "key/record.h"

namespace kvpool {

// Consecutive records of one group of layers, from the first token on.
struct LookupGroup {
  std::string_view hashes;  // packed, one per record; the caller keeps them alive until done()
  std::size_t hash_nbytes;
  std::uint16_t group;
  std::uint32_t ranks;  // a record is present when its parts of ranks 0 to ranks - 1 are
  std::uint64_t record_tokens;
  bool sliding_window;  // records after a missing one are useful
  // Of each part, to be copied near where a far pool has it (near_far/near_far.h); 0: it is only asked for.
  std::size_t prefetch_nbytes = 0;
};

// Keys are numbered by group, record and rank; records over all groups.
class Lookup {
 public:
  // `prefix`: of every key, "kvpool:{tenant}:{namespace}:". Throws std::invalid_argument.
  Lookup(std::string_view prefix, const std::vector<LookupGroup>& groups);

  std::size_t key_count() const { return key_count_; }
  std::size_t record_count() const { return record_count_; }
  Key key(std::size_t index) const;
  // Of key_count(): record_count().
  std::size_t record_of(std::size_t index) const;
  std::size_t prefetch_nbytes(std::size_t index) const { return place_of(index).records.prefetch_nbytes; }

  // The first key from `index` on that is still worth asking; key_count(): none is.
  std::size_t next_wanted(std::size_t index) const;
  // A part is missing: later records are useless, unless the group has a sliding window.
  void missed(std::size_t index);
  // No answer will come: nothing is worth asking.
  void give_up() { end_tokens_.store(0, std::memory_order_relaxed); }

 private:
  struct Place {
    LookupGroup records;
    std::size_t first_key;
    std::size_t end_key;
    std::size_t first_record;
  };
  const Place& place_of(std::size_t index) const;

  Key prefix_;
  std::vector<Place> places_;
  std::size_t key_count_ = 0;
  std::size_t record_count_ = 0;
  std::atomic<std::uint64_t> end_tokens_{std::numeric_limits<std::uint64_t>::max()};  // of the usable prefix
};

}  // namespace kvpool
