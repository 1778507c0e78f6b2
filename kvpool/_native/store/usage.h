// Bytes below the root, counted jointly by all processes of the host in one file, root/usage.
//
// The file's flock orders changes of the tree: adding or removing a file takes it shared (for microseconds,
// never during payload I/O); counting and evicting take it exclusively, and so see a stable tree. The kernel
// releases a dead process's lock. A stopped process keeps its own (SIGSTOP, a frozen container): who waits
// for half a second without a turn of others puts an empty file in this one's place, and all go on there.
// Counts then begin anew. The stopped process notices at its next lock; what it had under way under the old
// one may leave a bucket's count too low by a record, until the next sample of that bucket.
//
// The file is read and written, not mapped, because it may be cut, overwritten or deleted at any moment. Each
// count carries a check; an invalid count (zeros included) is unknown, and only its files are counted again.
//
// Each I/O thread has its own Usage: locks distinguish descriptors, not threads.
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

// The file system of a pool. A pool leaves `reserve_nbytes` of it free for others; 0: its size is unknown.
struct FileSystem {
  std::uint64_t total_nbytes = 0;
  std::uint64_t free_nbytes = 0;
  std::uint64_t reserve_nbytes = 0;
};
FileSystem file_system(int fd);

using GiveUp = std::function<bool()>;

inline constexpr unsigned kBuckets = 4096;          // directories of records: file.h
inline constexpr unsigned kTemporaries = kBuckets;  // the count of tmp/, including reservations
inline constexpr unsigned kFree = kBuckets + 1;     // of free/: evicted files that puts overwrite
inline constexpr unsigned kCounts = kBuckets + 2;

using Patience = std::chrono::steady_clock::duration;
// With a lock's holder, without a turn; a pass of eviction takes some milliseconds.
inline constexpr Patience kLockPatience = std::chrono::milliseconds(500);

// The file, little-endian.
struct UsagePage {
  std::array<char, 16> boot{};  // 0: the host's boot; counts do not outlive it
  // 16: the next bucket of eviction, modulo 4,096; grows whenever the lock is taken exclusively
  std::uint64_t cursor = 0;
  std::array<std::uint64_t, kCounts>
      counts{};  // 24: of each bucket, of tmp/ and of free/: bytes << 16 | check

  std::optional<std::uint64_t> nbytes(unsigned index) const;
  void set(unsigned index, std::uint64_t nbytes);
  struct Sum {
    std::uint64_t nbytes;  // uncounted buckets are assumed as full as the non-empty ones
    unsigned unknown;      // number of unknown counts
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

  // Unlocks on destruction.
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

  // `mode`: of the file, created if absent; none: never create. Throws std::filesystem::filesystem_error.
  Usage(std::string path, std::optional<mode_t> mode);

  // Polls until the lock is held, give_up() is true, or its holder seems stopped: nothing, in both.
  std::optional<Lock> lock(Hold hold, const GiveUp& give_up, Patience patience = kLockPatience) const;
  // Whether lock() waited for its patience without a turn of others, so that the holder must be stopped.
  bool stopped() const { return stopped_; }
  // False when path no longer names the open file: it, or its directory, was removed.
  bool current() const;

  // How many bytes to free before n more fit the capacity and the file system less its reserve.
  std::uint64_t excess_nbytes(const UsagePage& page, std::uint64_t n, std::uint64_t capacity_nbytes) const;
  // Whether an evicted file of n bytes may be overwritten: there are as many, and nothing is in excess.
  bool may_reuse(std::uint64_t n, std::uint64_t capacity_nbytes) const;
  // Adds n to the temporaries unless there is an excess, or the sum is not Known. Under the lock.
  bool reserve(std::uint64_t n, std::uint64_t capacity_nbytes, Known known);
  // Under the lock, in this order: what is added comes first, so that a process killed in between leaves too much, and
  // who reads in between sees it. An unknown count stays so.
  void change(std::initializer_list<Change> changes);

  UsagePage read() const;
  void write(const UsagePage& page);               // under the exclusive lock
  void set(unsigned index, std::uint64_t nbytes);  // under the exclusive lock

  // Without keeping it open; 0 if absent.
  static std::uint64_t used_nbytes(const std::string& path);

 private:
  // Orders changes among holders of the shared flock; false after a second without it.
  bool lock_counts() const;
  void unlock_counts() const;
  void store(unsigned index, std::uint64_t word) const;
  std::uint64_t cursor() const;

  std::string path_;
  Descriptor file_;
  std::uint64_t device_ = 0;
  std::uint64_t inode_ = 0;
  mutable Patience waited_{};  // in vain, since the lock was last held
  mutable bool stopped_ = false;
};

// Identifies the host's boot; zeros if unknown.
std::array<char, 16> boot_id();

}  // namespace kvpool
