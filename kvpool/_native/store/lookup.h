// The keys of one lookup: which leading records of a prompt are in the pool. Each key is spelled when it is sent; how
// far it is still worth asking follows from what was found missing. Knows no executor and no I/O thread.
//
// Who owns what: everything is fixed but `end_tokens_`, which any thread may lower. key() alone reads the hashes.
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
  std::string_view
      hashes;  // packed, one for each record; the caller's, who keeps them until the batch is done
  std::size_t hash_nbytes;
  std::uint16_t group;
  std::uint32_t ranks;  // a record is there when the parts of ranks 0 to ranks - 1 are
  std::uint64_t record_tokens;
  bool sliding_window;  // records behind a missing one are of use
};

// Keys are numbered group by group, in a group record by record, of a record rank by rank. Records are numbered over
// all groups.
class Lookup {
 public:
  // `prefix`: what every key starts with, "kvpool:{tenant}:{namespace}:". Throws std::invalid_argument.
  Lookup(std::string_view prefix, const std::vector<LookupGroup>& groups);

  std::size_t key_count() const { return key_count_; }
  std::size_t record_count() const { return record_count_; }
  Key key(std::size_t index) const;
  // Of key_count(): record_count().
  std::size_t record_of(std::size_t index) const;

  // The first key from `index` on that is still worth asking; key_count(): none is.
  std::size_t next_wanted(std::size_t index) const;
  // A part is not there: without it nothing behind it is of use, unless its group has a sliding window.
  void missed(std::size_t index);
  // There will be no answer: nothing is worth asking any more.
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
  std::atomic<std::uint64_t> end_tokens_{std::numeric_limits<std::uint64_t>::max()};  // of what may be used
};

}  // namespace kvpool
