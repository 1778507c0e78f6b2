// A Table at rest: copied out in a few milliseconds per million blocks, packed without the lock, read back.
//
// The bytes, little-endian; a number has 7 bits a byte, lowest first, and the highest bit announces more:
//
// header  "KVPTABLE", u32 version, u32 zero, u64 bytes of the body, u64 XXH3-64 of header (this field zero) and
//         body
// body    number of holders; each: length of its worker's name, the name, data-parallel rank, group, 1 if
//         engines may report absent blocks of it else 0, needed blocks at the end of a prefix (0: all), hashed
//         blocks in a block of it
//         number of sets; each: number of holdings, each (holder - the holder before, tiers as the low 4 bits);
//         then the number of blocks with this set, and their hashes, 8 bytes each
//         number of copies; each: holder, physical copies beyond the first, hash in 8 bytes
//
// A block costs 8 bytes where prompts share prefixes: sets are few, and hashes do not compress.
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

  std::vector<GroupHolder> holders;  // HolderId: its index
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

// The bytes are of another version, damaged, or malformed.
struct DamagedImage : std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::string pack_image(const TableImage& image);

// For untrusted bytes: ends with a valid image or DamagedImage, and takes memory in proportion to their number.
TableImage unpack_image(std::span<const std::byte> packed);

}  // namespace kvpool
