// The capacity of a file pool. It stands in the pool and holds for all its processes, whatever their URLs say.
//
//   root/capacity    a line with the bytes, and one for a person who finds it
//
// Where none stands (a new pool, one of an older kvpool, which ignores the file), the first process writes its own,
// or what the pool holds if that is more: one process's word evicts nothing of the others. Writers rename, readers take
// what makes no sense for none, also one that no URL may say: in a pool of a byte nothing would be stored.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>

namespace kvpool {

constexpr std::uint64_t kLeastCapacity = std::uint64_t{1} << 20;
constexpr std::uint64_t kUnlimited = std::numeric_limits<std::int64_t>::max();

// What stands in the pool; nothing if none.
std::optional<std::uint64_t> read_capacity(const std::string& root);
// Returns 0 or an errno.
int write_capacity(const std::string& root, mode_t mode, std::uint64_t nbytes);

// As one process sees it. Any thread.
class PoolCapacity {
 public:
  // `own_nbytes`: of the process's URL; kUnlimited: it says none, limits nothing and writes nothing.
  PoolCapacity(std::string root, std::uint64_t own_nbytes);

  // What holds; read again when a second has passed. Each hour the pool is renewed.
  std::uint64_t nbytes();
  // What holds now. Writes it where none stands. Under the exclusive lock of the counts.
  std::uint64_t settle(std::uint64_t held_nbytes, mode_t mode);

 private:
  using Clock = std::chrono::steady_clock;

  void look();

  const std::string root_;
  const bool limits_;
  std::atomic<std::uint64_t> nbytes_;
  std::atomic<Clock::time_point> look_at_{};
  std::atomic<Clock::time_point> renew_at_{};
};

}  // namespace kvpool
