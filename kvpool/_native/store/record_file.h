// How a record lies in a file: the payload, zeros, and the header at the end of a block of 4 KiB.
//
// So whole blocks are read and written past the page cache (O_DIRECT), which serves a disk: the cache costs a copy of
// each byte, and its write-back delays everybody's. A file on tmpfs is the cache. The file's size is that of its blocks
// and, as a hole, of the zeros once more: so it tells the payload's length.
#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "key/record.h"
#include "store/aligned_bytes.h"

namespace kvpool {

inline constexpr std::size_t kFileBlock = 4096;

// What a file of records takes of the file system, by its size.
std::uint64_t file_nbytes(const struct stat& info);
// Of a record.
std::uint64_t file_nbytes(std::uint64_t payload_nbytes);
std::uint64_t file_size(std::uint64_t payload_nbytes);
// None: a file of this size has no record.
std::optional<std::uint64_t> payload_nbytes(const struct stat& info);

// Whether the path still names the file that was opened, and nobody has touched it. By two times: the kernel's may move
// by timer ticks, in which a file can come back under its name with other bytes, and another user's has that alone.
bool is_as_opened(const std::string& path, const struct stat& opened);

// Whether a pool's files are read and written past the page cache. Any thread.
class Direct {
 public:
  // `root`: of the pool. Never on tmpfs.
  explicit Direct(const std::string& root);

  // Sets or clears O_DIRECT.
  void apply(int fd);
  bool may(const std::byte* memory) const {
    return reinterpret_cast<std::uintptr_t>(memory) % memory_alignment_.load(std::memory_order_relaxed) == 0;
  }
  bool on() const { return on_.load(std::memory_order_relaxed); }
  // `fd` refused `memory`: whether it may be tried again, as less is asked of both now.
  bool asks_less(int fd, const std::byte* memory);

 private:
  // What most devices ask of memory; some ask for a page.
  std::atomic<std::size_t> memory_alignment_{512};
  std::atomic<bool> on_;
};

// Reads and writes records. One thread.
class RecordFile {
 public:
  // Between the parts of a record; true gives it up.
  using GiveUp = std::function<bool()>;
  enum class End { kWhole, kGivenUp, kCut, kError };  // kCut: the file ends before; kError: errno tells

  // `direct`: outlives this.
  explicit RecordFile(Direct& direct) : direct_(direct) {}

  // `seal`: makes the header behind the payload; `hashes`: whether it needs the payload's checksum.
  End write(int fd, std::span<const std::byte> payload, bool hashes,
            const std::function<RecordHeader(RecordChecksum&)>& seal, const GiveUp& give_up);
  End read(int fd, std::span<std::byte> payload, RecordHeader& header, RecordChecksum& checksum,
           const GiveUp& give_up);
  // After kError of `error`: whether it may be tried again. EFAULT: of memory that the system cannot pin (a device's).
  bool asks_less(int fd, int error) {
    return (error == EINVAL || error == EOPNOTSUPP || error == EFAULT) && direct_.asks_less(fd, memory_);
  }

 private:
  // Whole blocks of the payload in one call, and where they are in memory.
  struct Step {
    std::size_t nbytes = 0;
    std::byte* memory = nullptr;  // null: the payload's own
  };
  Step step_at(const std::byte* payload, std::size_t whole, std::size_t begin);

  Direct& direct_;
  const std::byte* memory_ = nullptr;  // of the last step
  AlignedBytes tail_ = make_aligned_bytes(2 * kFileBlock);
  AlignedBytes between_;  // for payloads that lie where O_DIRECT takes nothing
};

}  // namespace kvpool
