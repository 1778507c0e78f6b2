// `PoolListing`: which blocks of one namespace a file pool holds, and how that changed since it was last told.
//
// A directory says nothing of what is evicted from it by other processes, so it is listed again. A block is there
// when the records of all its ranks are: as many as any block of its group was ever seen with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace kvpool {

// One thread at a time.
class PoolListing {
 public:
  struct Change {
    std::uint32_t group;
    std::vector<std::uint64_t> came, went;  // the last 64 bits of blocks' hashes
  };

  // root: of the pool. most_records: above, a look goes no further.
  PoolListing(std::string root, std::string tenant, std::string name_space, std::size_t most_records);

  // Lists the directory; one that is gone is empty. Returns the number of blocks. Throws the system's
  // std::filesystem::filesystem_error for one that cannot be read.
  std::size_t look();
  // From what was told to the last look, by group.
  std::vector<Change> changes();
  // The last changes() were told, up to the look that they were of.
  void told();
  // Nothing was told.
  void forget();

 private:
  struct Block {
    std::uint32_t group;
    std::uint64_t hash;
    auto operator<=>(const Block&) const = default;
  };
  using Blocks = std::vector<Block>;  // rising

  std::string root_, prefix_;
  std::size_t most_records_;
  std::map<std::uint32_t, std::uint32_t> ranks_;  // by group
  Blocks seen_, asked_, told_;
};

}  // namespace kvpool
