// Evicted files that puts overwrite, which costs a disk a third and tmpfs two thirds of what new ones do: their blocks,
// or pages, are there already.
//
//   root/free/{bytes}.{random}
//
// They count as used. Their bytes belong to no record; who reads one meanwhile, having opened it before, finds that it
// is no longer where it was.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace kvpool {

// An I/O thread's view. All under the lock of the counts.
class FreeFiles {
 public:
  explicit FreeFiles(std::string root) : folder_(std::move(root) + "/free") {}

  // Moves one of exactly so many bytes to `path`. Lists the folder where none that it knows of fits.
  bool take(std::uint64_t nbytes, const std::string& path);
  // Moves a record's file here. Returns 0 or an errno.
  int give(const std::string& path, std::uint64_t nbytes);
  // Deletes at least so many bytes, if there are. Returns the bytes that are left.
  std::uint64_t remove(std::uint64_t nbytes);

 private:
  struct File {
    std::uint64_t nbytes;
    std::string name;
  };
  void look();
  std::string path_of(const File& file) const { return folder_ + "/" + file.name; }

  const std::string folder_;
  std::vector<File> known_;
  std::random_device random_;
};

}  // namespace kvpool
