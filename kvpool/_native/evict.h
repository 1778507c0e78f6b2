// The eviction pass: counts the tree, removes what dead writers left, and deletes the least recently used records.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "usage.h"

namespace kvpool {

struct Evicted {
  std::uint64_t records = 0;
  std::uint64_t nbytes = 0;
};

// Under the exclusive lock of `usage`. Afterwards the counter is the truth, and at most `target_nbytes`
// unless give_up() said so or files could not be deleted. Temporary files of living writers are never touched.
Evicted run_pass(const std::string& root, Usage& usage, std::uint64_t target_nbytes,
                 const std::function<bool()>& give_up);

}  // namespace kvpool
