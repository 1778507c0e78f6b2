// Counting and eviction by sampled buckets, never the whole store.
//
// A bucket is a fair sample of the store, so its oldest tenth is about the store's oldest tenth. Eviction
// takes that from bucket after bucket, several at once if small. Its cost per record is independent of the
// store's size. A store within one sample is evicted in exact order.
//
// Only files with a record's name are counted or deleted, and in tmp/ only those with a temporary file's.
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

// Under the exclusive lock. Removes dead writers' files in tmp/, and counts unknown buckets, at least some,
// until `until`. Counts persist for the next call.
void count(const std::string& root, Usage& usage, Clock::time_point until);

// Under the exclusive lock, after count(). Deletes until `n` more bytes fit the capacity, nothing deletable
// is left, or give_up() is true; it deletes something even then. Counts its samples.
Evicted make_room(const std::string& root, Usage& usage, std::uint64_t n, std::uint64_t capacity_nbytes,
                  const GiveUp& give_up);

}  // namespace kvpool
