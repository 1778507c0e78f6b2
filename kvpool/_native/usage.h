// How many bytes lie below the root, counted by all processes of the host together in one mapped file,
// root/usage.
//
// The file's flock orders what changes the tree: whoever adds or removes a file holds it shared (for
// microseconds, never while payload is written), the eviction pass holds it exclusively. So a pass sees a
// tree that stands still, and the sum of the file sizes that it finds *is* the counter. The kernel releases
// the lock of a dead process.
//
// Each lane has a Usage of its own: flock tells descriptors apart, not threads.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "descriptor.h"

namespace kvpool {

// The file, as it lies in memory.
struct UsagePage {
  std::uint64_t magic;                     //  0: kUsageMagic; fixes this layout
  std::atomic<std::uint64_t> used_nbytes;  //  8: sizes of all files in blocks/ and tmp/, and reservations
  std::uint64_t reserved[6];               // 16: zero
};
static_assert(sizeof(UsagePage) == 64 && std::atomic<std::uint64_t>::is_always_lock_free);
inline constexpr std::uint64_t kUsageMagic = 0x31304753'5550564b;  // "KVPUSG01"

class Usage {
 public:
  enum class Hold { kShared, kExclusive };

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

  // Opens or creates path; a file that is not one of ours is made one. Throws
  // std::filesystem::filesystem_error.
  explicit Usage(std::string path);

  // Polls until the lock is held or give_up() says so. A blocking flock() could not be given up.
  std::optional<Lock> lock(Hold hold, const std::function<bool()>& give_up) const;
  // False when path is no longer the file that is mapped here: somebody removed the directory.
  bool current() const;
  // True when the counter had to be invented and no pass of ours has counted since.
  bool invented() const { return invented_; }

  // Adds n unless that would cross the capacity. Under the lock.
  bool reserve(std::uint64_t n, std::uint64_t capacity_nbytes);
  void release(std::uint64_t n);  // under the lock
  void set(std::uint64_t n);      // under the exclusive lock
  std::uint64_t used_nbytes() const;

  // Without opening it for good; 0 when there is none.
  static std::uint64_t read(const std::string& path);

 private:
  struct Unmap {
    void operator()(UsagePage* page) const;
  };

  std::string path_;
  Descriptor file_;
  std::unique_ptr<UsagePage, Unmap> page_;
  std::uint64_t device_ = 0;
  std::uint64_t inode_ = 0;
  bool invented_ = false;
};

}  // namespace kvpool
