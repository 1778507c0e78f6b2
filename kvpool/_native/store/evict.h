// Counting and eviction: both look at some buckets and never need the whole store.
//
// A bucket is a fair sample of the store, so the oldest tenth of one is about the oldest tenth of all: eviction
// takes that from one bucket after another (from several at once where they hold little), and what it costs a
// record does not depend on how many there are. A store of no more records than one sample is seen whole and
// evicted in exact order.
//
// Only what has a record's name is counted or deleted, and in tmp/ only what has a temporary file's.
#pragma once

#include <cstdint>
#include <string>

#include "store/io_executor.h"
#include "store/usage.h"

namespace kvpool {

struct Evicted {
  std::uint64_t records = 0;
  std::uint64_t nbytes = 0;
};

// Under the exclusive lock. Removes what dead writers left in tmp/, and counts those buckets whose count is
// unknown, some at least and for as long as `until`. What was counted is kept for the next call.
void count(const std::string& root, Usage& usage, Clock::time_point until);

// Under the exclusive lock, after count(). Deletes until `n` more bytes fit below the capacity, nothing more can be
// deleted, or give_up() says so; then something was deleted all the same. Counts what it looks at.
Evicted make_room(const std::string& root, Usage& usage, std::uint64_t n, std::uint64_t capacity_nbytes,
                  const GiveUp& give_up);

}  // namespace kvpool
