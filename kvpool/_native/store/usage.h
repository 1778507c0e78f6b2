// How many bytes lie below the root, counted by all processes of the host together in one file, root/usage.
//
// The file's flock orders what changes the tree: a process that adds or removes a file holds it shared (for
// microseconds, never while payload is written); one that counts or evicts holds it exclusively, and so sees
// files that stand still. The kernel releases the lock of a dead process.
//
// The file is read and written, not mapped: it may be cut, overwritten or deleted at any moment. Each count
// carries a check, and what fails it (zeros, too) is unknown: those files are then counted again, and no others.
//
// Each I/O thread has a Usage of its own: locks tell descriptors apart, not threads.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>

#include "store/descriptor.h"

namespace kvpool {

using GiveUp = std::function<bool()>;

inline constexpr unsigned kBuckets = 4096;          // directories of records: file.h
inline constexpr unsigned kTemporaries = kBuckets;  // the count of tmp/, reservations among it
inline constexpr unsigned kCounts = kBuckets + 1;

// The file, little-endian.
struct UsagePage {
  std::array<char, 16> boot{};                  //  0: of which start of the host; counts do not outlive one
  std::uint64_t cursor = 0;                     // 16: the bucket that eviction looks at next, modulo 4,096
  std::array<std::uint64_t, kCounts> counts{};  // 24: of each bucket, then of tmp/: bytes << 16 | check

  std::optional<std::uint64_t> nbytes(unsigned index) const;
  void set(unsigned index, std::uint64_t nbytes);
  struct Sum {
    std::uint64_t nbytes;  // buckets that are not counted are taken for as full as those that hold something
    unsigned unknown;      // how many counts are
  };
  Sum sum() const;
};
static_assert(sizeof(UsagePage) == 24 + 8 * kCounts);

class Usage {
 public:
  enum class Hold { kShared, kExclusive };
  enum class Known { kAll, kEstimated };
  struct Change {
    unsigned index;
    std::int64_t nbytes;
  };

  // Unlocks when it goes.
  class Lock {
   public:
    explicit Lock(int fd) : fd_(fd) {}
    Lock(Lock&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Lock& operator=(Lock&& other) noexcept {
      std::swap(fd_, other.fd_);
      return *this;
    }
    ~Lock();

   private:
    int fd_;
  };

  // `mode`: of the file, which is made if it is not there; none: it is not made. Throws
  // std::filesystem::filesystem_error.
  Usage(std::string path, std::optional<mode_t> mode);

  // Polls until the lock is held or give_up() says so. A blocking flock() could not be given up.
  std::optional<Lock> lock(Hold hold, const GiveUp& give_up) const;
  // False when path is no longer the file that is open here: it was removed, or the directory was.
  bool current() const;

  // Adds n to the temporaries unless the sum would cross the capacity, or is not Known. Under the lock.
  bool reserve(std::uint64_t n, std::uint64_t capacity_nbytes, Known known);
  // Under the lock. A count that is unknown stays so.
  void change(std::initializer_list<Change> changes);

  UsagePage read() const;
  void write(const UsagePage& page);               // under the exclusive lock
  void set(unsigned index, std::uint64_t nbytes);  // under the exclusive lock

  // Without opening it for good; 0 when there is none.
  static std::uint64_t used_nbytes(const std::string& path);

 private:
  // Orders the changes of those who hold the flock shared; false after a second in which it was not to be had.
  bool lock_counts() const;
  void unlock_counts() const;
  void store(unsigned index, std::uint64_t word) const;

  std::string path_;
  Descriptor file_;
  std::uint64_t device_ = 0;
  std::uint64_t inode_ = 0;
};

// Of this start of the host; zeros where it is not told.
std::array<char, 16> boot_id();

}  // namespace kvpool
