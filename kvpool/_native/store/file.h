// The file backend: one file per record below a directory that all processes of the host share.
//
//   root/kvpool-pool                                  the marker of a pool, with the format of all this (pool_directory.h)
//   root/usage                                        the shared byte counts and the lock (usage.h)
//   root/tmp/{pid}.{io_thread}.{sequence}.{random}         being written; its writer holds its flock
//   root/blocks/{bucket}/{tenant}.{namespace}.{hash}.{group}.{rank}   header and payload; mtime is the last use
//
// A record appears by rename, whole. Nothing is fsynced: this is a cache, and after a power loss the checksum
// turns what is torn into a miss.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "store/io_executor.h"
#include "store/pool_directory.h"

namespace kvpool {

class FileBackend : public Backend {
 public:
  enum class Open {
    kMake,  // creates a pool if absent, and evicts down to the capacity
    kFind,  // opens an existing pool without writing or evicting
  };

  // Throws RefusedDirectory, or the system's std::filesystem::filesystem_error.
  FileBackend(const std::string& root, std::uint64_t capacity_nbytes, Open how);

  std::unique_ptr<IoThread> make_io_thread(unsigned index) override;
  void append_counters(Counters& counters) const override;

 private:
  friend class FileIoThread;

  std::string root_;    // absolute: the process may change its directory
  PoolDirectory pool_;  // as it was at open
  const std::uint64_t capacity_nbytes_;
  std::array<std::atomic<std::uint64_t>, kDamageCount> damaged_{};
  std::atomic<std::uint64_t> evicted_{0};
  std::atomic<std::uint64_t> evicted_nbytes_{0};
  std::atomic<std::uint64_t> passes_{0};
};

}  // namespace kvpool
