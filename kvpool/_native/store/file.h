// The file backend: one file per record below a directory that all processes of the host share.
//
//   root/kvpool-pool                                  the marker of a pool, with the format of all this (pool_directory.h)
//   root/usage                                        the shared byte counts and the lock (usage.h)
//   root/capacity                                     most bytes of records (pool_capacity.h)
//   root/free/{bytes}.{random}                        evicted, for puts to overwrite (free_files.h)
//   root/tmp/{pid}.{io_thread}.{sequence}.{random}         being written; its writer holds its flock
//   root/blocks/{bucket}/{tenant}.{namespace}.{hash}.{group}.{rank}   a record (record_file.h); mtime is the last use
//
// A record appears by rename, whole. Nothing is fsynced: this is a cache, and after a power loss the checksum
// turns what is torn into a miss.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <string>

#include "store/free_files.h"
#include "store/io_executor.h"
#include "store/pool_capacity.h"
#include "store/pool_directory.h"
#include "store/record_file.h"
#include "store/usage.h"

namespace kvpool {

class FileBackend : public Backend {
 public:
  // Makes `root` a pool if it is none, and evicts down to the pool's capacity; `capacity_nbytes` is that of a pool
  // without one, kUnlimited: of none. No capacity: opens an existing pool without writing or evicting. Throws
  // RefusedDirectory, or the system's std::filesystem::filesystem_error.
  FileBackend(const std::string& root, std::optional<std::uint64_t> capacity_nbytes,
              Patience lock_patience = kLockPatience);

  std::unique_ptr<IoThread> make_io_thread(unsigned index) override;
  void append_counters(Counters& counters) const override;

 private:
  friend class FileIoThread;

  std::string root_;  // absolute: the process may change its directory
  PoolCapacity capacity_;
  const Patience lock_patience_;
  PoolDirectory pool_;  // as it was at open
  Direct direct_;
  DamageCounts damaged_;
  std::atomic<std::uint64_t> evicted_{0};
  std::atomic<std::uint64_t> evicted_nbytes_{0};
  std::atomic<std::uint64_t> passes_{0};
};

// An I/O thread, with its own view of the shared counts.
class FileIoThread : public IoThread {
 public:
  FileIoThread(FileBackend& backend, unsigned index)
      : backend_(backend),
        pool_(backend.pool_),
        index_(index),
        free_(backend.root_),
        record_file_(backend.direct_) {}

  void run(Source& source) override;
  // At open: dead writers' files may remain, and the pool may have no capacity yet, or a smaller one.
  void settle();

 private:
  struct Outcome {
    Status status;
    std::string error = {};
    Blame blame = Blame::kStore;  // of the error
  };
  class Temporary;

  Outcome execute(const Item& item);
  Outcome get(const Item& item, const std::string& path);
  // Returns 0 when `outcome` is decided, else an errno. EAGAIN: it was replaced meanwhile, or the file system refused to
  // be read past its cache.
  int get_once(const Item& item, const std::string& path, Outcome& outcome);
  Outcome damaged(const Item& item, const std::string& path, Damage damage);
  Outcome unreadable(const Item& item, const std::string& path, int error);
  Outcome counted(Damage damage);

  Outcome contains(const Item& item, const std::string& path) const;
  Outcome touch(const Item& item, const std::string& path) const;
  Outcome expire(const Item& item, const std::string& path) const;
  Outcome remove_record(const Item& item, const std::string& path);
  int remove(const std::string& path, unsigned bucket);
  int remove(const std::string& path, unsigned counted_in, std::uint64_t nbytes);
  void remove_free(const Item& item);
  void give_back(unsigned counted_in, std::uint64_t nbytes);

  // Concurrent writers that both find nothing both put; the last one's record stays.
  Outcome put_absent(const Item& item, const std::string& path);
  Outcome put(const Item& item, const std::string& path);
  int put_once(const Item& item, const std::string& path, std::uint64_t nbytes, Outcome& outcome);
  bool begin(std::optional<Temporary>& temporary, std::uint64_t payload_nbytes, std::uint64_t capacity_nbytes,
             Usage::Known known, int& error);
  int write(const Item& item, int fd, Outcome& outcome);
  int publish(Temporary& temporary, const std::string& path, std::uint64_t& replaced_nbytes);
  int publish_plainly(Temporary& temporary, const std::string& path, std::uint64_t& replaced_nbytes);
  int make_bucket(const std::string& path) const;

  void evict(std::uint64_t n, std::uint64_t capacity_nbytes, const GiveUp& give_up);
  std::optional<Status> make_space(const Item& item, std::uint64_t nbytes);

  int refresh();
  std::optional<Usage::Lock> lock(Usage::Hold hold, const GiveUp& give_up);
  void find_usage();
  int make_again(const std::string& path) const;

  std::string temporary_path();
  static Outcome fault(const char* what, const std::string& path, int error);
  static void mark_used(int fd, Clock::time_point used_at);
  static void mark_used(const std::string& path, Clock::time_point used_at);

  FileBackend& backend_;
  PoolDirectory pool_;
  const unsigned index_;
  std::optional<Usage> usage_;  // opened when first needed
  FreeFiles free_;
  RecordFile record_file_;
  std::uint64_t sequence_ = 0;
  std::random_device random_;
};

// Counting and eviction by sampled buckets, never the whole store.
//
// A bucket is a fair sample of the store, so its oldest tenth is about the store's oldest tenth. Eviction
// takes that from bucket after bucket, several at once if small. Its cost per record is independent of the
// store's size. A store within one sample is evicted in exact order.
//
// Only files with a record's name are counted or evicted, and in tmp/ and free/ only those with names of theirs.
struct Evicted {
  std::uint64_t records = 0;
  std::uint64_t nbytes = 0;
};

// Under the exclusive lock. Removes dead writers' files in tmp/, and counts unknown buckets, at least some,
// until `until`. Counts persist for the next call.
void count(const std::string& root, Usage& usage, FreeFiles& free, Clock::time_point until);

// Under the exclusive lock, after count() and trim(). Evicts until `n` more bytes leave no excess (usage.h) beyond what it
// made free to overwrite, nothing is left to evict, or give_up() is true; it evicts something even then. What trim() left
// is no help: it cannot be deleted. Counts its samples.
Evicted make_room(const std::string& root, Usage& usage, FreeFiles& free, std::uint64_t n,
                  std::uint64_t capacity_nbytes, const GiveUp& give_up);

// Under the exclusive lock. Deletes free files until `n` more bytes leave no excess.
void trim(Usage& usage, FreeFiles& free, std::uint64_t n, std::uint64_t capacity_nbytes);

}  // namespace kvpool
