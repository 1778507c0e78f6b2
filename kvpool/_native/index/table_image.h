// What a Table holds, at rest: copied out of one in a few milliseconds for a million blocks, packed into bytes when
// nobody waits, read back, and made into another table.
//
// The bytes, little-endian; a number is 7 bits a byte, lowest first, the highest bit says that more follow:
//   header  "KVPTABLE", u32 version, u32 zero, u64 bytes of the body, u64 XXH3-64 of header (this field zero) and body
//   body    how many holders; each: length of its worker's name, the name, data-parallel rank, group, 1 if engines
//             may report blocks of it that are gone else 0, how many blocks at the end of a prefix it needs (0: all), how
//             many hashed blocks are in a block of it
//           how many sets; each: how many holdings, each (holder - the holder before, tiers as the low 4 bits); then how
//             many blocks have this set, and their hashes, 8 bytes each
//           how many copies; each: holder, physical copies beyond the first, hash in 8 bytes
// So a block costs 8 bytes where prompts share prefixes: sets are few, and a hash has nothing to be squeezed out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "index/holders.h"

namespace kvpool {

struct TableImage {
  struct GroupHolder {
    std::string worker;
    std::uint32_t dp_rank;
    std::uint32_t group;
    bool partial;
    std::uint32_t last;
    std::uint32_t stride;
    std::uint64_t evicted;
  };
  struct Copies {
    HolderId holder;
    std::uint32_t more;  // beyond the first, at least 1
    std::uint64_t hash;
  };

  std::vector<GroupHolder> holders;  // a HolderId here is a place in it
  std::vector<Holding> holdings;
  std::vector<std::size_t> set_ends;  // set i: the holdings from set_ends[i - 1] on, and before set_ends[i]
  std::vector<std::uint64_t> hashes;
  std::vector<std::uint32_t> set_of;  // by place of the hash
  std::vector<Copies> copies;

  std::span<const Holding> set(std::size_t place) const {
    const std::size_t begin = place == 0 ? 0 : set_ends[place - 1];
    return std::span(holdings).subspan(begin, set_ends[place] - begin);
  }
};

// The bytes are of another version, damaged, or make no sense.
class DamagedImage : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::vector<std::byte> pack_image(const TableImage& image);

// Believes nothing: whatever the bytes are, it ends with an image of the form above or with DamagedImage, and takes
// memory in proportion to their number.
TableImage unpack_image(std::span<const std::byte> packed);

}  // namespace kvpool
