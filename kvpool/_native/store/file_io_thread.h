// One I/O thread of the file backend (file.h), with its own view of the shared counts.
#pragma once

#include <sys/types.h>

#include <cerrno>
#include <cstdint>
#include <optional>
#include <random>
#include <span>
#include <string>

#include "store/file.h"
#include "store/io_executor.h"
#include "store/pool_directory.h"
#include "store/usage.h"

namespace kvpool {

class FileIoThread : public IoThread {
 public:
  FileIoThread(FileBackend& backend, unsigned index)
      : backend_(backend), pool_(backend.pool_), index_(index) {}

  void run(Source& source) override;
  // At open: dead writers' files may remain, and the capacity may have shrunk.
  void settle();

 private:
  struct Outcome {
    Status status;
    std::string error = {};
  };
  class Temporary;

  Outcome execute(const Item& item);
  Outcome get(const Item& item, const std::string& path);
  Outcome damaged(const Item& item, const std::string& path, Damage damage);
  Outcome unreadable(const Item& item, const std::string& path, int error);
  Outcome counted(Damage damage);

  Outcome contains(const std::string& path) const;
  Outcome touch(const std::string& path) const;
  Outcome remove_record(const std::string& path, unsigned bucket);
  int remove(const std::string& path, unsigned bucket);
  int remove(const std::string& path, unsigned counted_in, std::uint64_t nbytes);
  void give_back(unsigned counted_in, std::uint64_t nbytes);

  // Concurrent writers that both find nothing both put; the last one's record stays.
  Outcome put_absent(const Item& item, const std::string& path);
  Outcome put(const Item& item, const std::string& path);
  int put_once(const Item& item, const std::string& path, std::uint64_t nbytes, Outcome& outcome);
  int write(const Item& item, int fd, Outcome& outcome) const;
  static int write_all(int fd, std::span<const std::byte> data, std::size_t offset);
  int publish(Temporary& temporary, const std::string& path, std::uint64_t& replaced_nbytes);
  int publish_plainly(Temporary& temporary, const std::string& path, std::uint64_t& replaced_nbytes);
  int make_bucket(const std::string& path) const;

  void evict(std::uint64_t n, std::uint64_t capacity_nbytes, const GiveUp& give_up);
  std::optional<Status> make_space(const Item& item, std::uint64_t nbytes);

  int refresh();
  void find_usage();
  int make_again(const std::string& path) const;

  std::string temporary_path();
  static Outcome fault(const char* what, const std::string& path, int error);
  static void mark_used(int fd);
  static void mark_used(const std::string& path);

  template <typename Call>
  static ssize_t retry(Call call) {
    for (;;) {
      const ssize_t n = call();
      if (n >= 0 || errno != EINTR) return n;
    }
  }

  FileBackend& backend_;
  PoolDirectory pool_;
  const unsigned index_;
  std::optional<Usage> usage_;  // opened when first needed
  std::uint64_t sequence_ = 0;
  std::random_device random_;
};

}  // namespace kvpool
