// A hash map of 64-bit keys and 32-bit values that grows a little at a time: extendible hashing over segments
// of at most 32 KiB. A full segment is split in two; nothing ever rehashes the whole map, so the longest pause
// of an insertion is one split (about 20 us), at a thousand entries and at a hundred million.
//
// A bucket is one cache line of five entries. Entries that do not fit go to the next bucket; how many went past
// is counted, so that a search knows where to stop and an erasure leaves no tombstone.
//
// No locks: the owner has one.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace kvpool {

class FlatMap {
 public:
  static constexpr std::size_t kBucketEntries = 5;
  static constexpr std::size_t kSegmentBuckets = 512;
  // Keys are mixed with a seed that nobody outside knows, so only chance can fill one segment again and again;
  // where that reaches this many bits, insert() refuses.
  static constexpr unsigned kMaxDepth = 24;

  explicit FlatMap(std::uint64_t seed);
  FlatMap(const FlatMap&) = delete;
  FlatMap& operator=(const FlatMap&) = delete;

  // Where a search for a key begins. Holds until the next insert().
  struct Place;

  // Null when it is not there. The pointer holds until the next insert() or erase().
  std::uint32_t* find(std::uint64_t key);
  const std::uint32_t* find(std::uint64_t key) const;
  const std::uint32_t* find(const Place& place, std::uint64_t key) const;
  // (the value's place, whether it is new); a value that is there stays as it is. Null: no room (kMaxDepth).
  std::pair<std::uint32_t*, bool> insert(std::uint64_t key, std::uint32_t value);
  bool erase(std::uint64_t key);

  // Has the first cache line that find(key) will look at loaded.
  Place prefetch(std::uint64_t key) const;

  // Erases what is_dead(value) says of one segment, the one at `cursor`, and moves the cursor to the next one; a
  // cursor that starts at 0 and comes back to 0 has met every entry that stayed in the map meanwhile.
  template <typename IsDead>
  void sweep_segment(std::uint64_t& cursor, IsDead is_dead);

  // Calls visit(key, value) for each entry, in no particular order.
  template <typename Visit>
  void for_each(Visit visit) const;

  // Calls visit(key, value) for the entries of one segment, and moves the cursor as sweep_segment() does. visit may
  // erase the entry that it is given, and change nothing else.
  template <typename Visit>
  void visit_segment(std::uint64_t& cursor, Visit visit) const;

  std::size_t size() const { return size_; }
  std::size_t nbytes() const;
  // How often an entry stands behind a bucket that it would rather be in: 0 when there are no entries.
  std::uint64_t passes() const;

 private:
  struct alignas(64) Bucket {
    std::uint64_t key[kBucketEntries];
    std::uint32_t value[kBucketEntries];
    std::uint16_t passed;  // entries that were sent on from here, by this bucket or to it from one before
    std::uint8_t used;     // bit i: entry i is there
    std::uint8_t unused;
  };
  static_assert(sizeof(Bucket) == 64);

  struct Segment {
    Segment(unsigned depth_, std::size_t count)
        : buckets(new Bucket[count]()), mask(count - 1), depth(depth_) {}
    std::size_t capacity() const { return (mask + 1) * kBucketEntries; }

    std::unique_ptr<Bucket[]> buckets;
    std::size_t mask;
    std::size_t size = 0;
    std::size_t owned_at = 0;  // in segments_
    unsigned depth;            // bits of the mixed key that all entries share
  };

  // What a search needs of a segment, one dependent load nearer.
  struct Entrance {
    Bucket* buckets;
    std::size_t mask;
    Segment* segment;
  };

  // A bijection (the finalizer of MurmurHash3): equal only for equal keys. Its high bits choose the segment, its
  // low ones the bucket.
  std::uint64_t mix(std::uint64_t key) const {
    key ^= seed_;
    key = (key ^ (key >> 33)) * 0xff51afd7ed558ccdULL;
    key = (key ^ (key >> 33)) * 0xc4ceb9fe1a85ec53ULL;
    return key ^ (key >> 33);
  }
  Place locate(std::uint64_t key) const;
  std::size_t directory_index(std::uint64_t mixed) const { return depth_ == 0 ? 0 : mixed >> (64 - depth_); }
  static std::uint32_t* find_at(const Place& place, std::uint64_t key);

  static std::uint32_t* insert_new(Segment& segment, std::uint64_t mixed, std::uint64_t key,
                                   std::uint32_t value);
  bool make_room(std::uint64_t mixed);
  void refill(const Segment& from, Segment& low, Segment& high) const;
  Entrance add_segment(unsigned depth, std::size_t buckets);
  void remove_segment(Segment* segment);

  std::uint64_t seed_;
  unsigned depth_ = 0;  // log2 of the directory's size
  std::size_t segments_nbytes_ = 0;
  std::vector<std::unique_ptr<Segment>> segments_;
  std::vector<Entrance>
      directory_;  // by the high bits of the mixed key; a segment may stand in it many times
  std::size_t size_ = 0;
};

struct FlatMap::Place {
  Bucket* buckets;
  std::size_t mask;
  std::size_t bucket;
};

inline FlatMap::Place FlatMap::locate(std::uint64_t key) const {
  const std::uint64_t mixed = mix(key);
  const Entrance& entrance = directory_[directory_index(mixed)];
  return {entrance.buckets, entrance.mask, mixed & entrance.mask};
}

inline std::uint32_t* FlatMap::find_at(const Place& place, std::uint64_t key) {
  std::size_t i = place.bucket;
  do {
    Bucket& bucket = place.buckets[i];
    // Without branches: which entry it is cannot be predicted, and five guesses cost more than five comparisons.
    unsigned equal = 0;
    for (std::size_t entry = 0; entry < kBucketEntries; ++entry) {
      equal |= static_cast<unsigned>(bucket.key[entry] == key) << entry;
    }
    equal &= bucket.used;
    if (equal != 0) return &bucket.value[std::countr_zero(equal)];
    if (bucket.passed == 0) return nullptr;
    i = (i + 1) & place.mask;
  } while (i != place.bucket);  // many erasures may leave every bucket passed by something
  return nullptr;
}

inline std::uint32_t* FlatMap::find(std::uint64_t key) { return find_at(locate(key), key); }
inline const std::uint32_t* FlatMap::find(std::uint64_t key) const { return find_at(locate(key), key); }
inline const std::uint32_t* FlatMap::find(const Place& place, std::uint64_t key) const {
  return find_at(place, key);
}

inline FlatMap::Place FlatMap::prefetch(std::uint64_t key) const {
  const Place place = locate(key);
  __builtin_prefetch(&place.buckets[place.bucket]);
  return place;
}

template <typename IsDead>
void FlatMap::sweep_segment(std::uint64_t& cursor, IsDead is_dead) {
  visit_segment(cursor, [&](std::uint64_t key, std::uint32_t value) {
    if (is_dead(value)) erase(key);
  });
}

template <typename Visit>
void FlatMap::visit_segment(std::uint64_t& cursor, Visit visit) const {
  const Segment& segment = *directory_[directory_index(cursor)].segment;
  for (std::size_t i = 0; i <= segment.mask; ++i) {
    const Bucket& bucket = segment.buckets[i];
    for (std::size_t entry = 0; entry < kBucketEntries; ++entry) {
      if ((bucket.used >> entry & 1) != 0) visit(bucket.key[entry], bucket.value[entry]);
    }
  }
  // The first mixed key behind the segment; wraps to 0 behind the last one.
  const unsigned shift = 64 - segment.depth;
  cursor = segment.depth == 0 ? 0 : ((cursor >> shift) + 1) << shift;
}

template <typename Visit>
void FlatMap::for_each(Visit visit) const {
  std::uint64_t cursor = 0;
  do {
    visit_segment(cursor, visit);
  } while (cursor != 0);
}

}  // namespace kvpool
