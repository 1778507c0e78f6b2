// A hash map of 64-bit keys and 32-bit values that grows a little at a time: extendible hashing over segments
// of at most 32 KiB. A full segment is split in two; the whole map is never rehashed. The longest pause of an
// insertion is one split (about 20 us), at a thousand entries and at a hundred million.
//
// A bucket is one cache line of five entries. Other entries go to the next bucket; a count of passed entries
// tells a search where to stop, so an erasure leaves no tombstone.
//
// Spare bits of a bucket hold each entry's rounds: how often it survives the hand of evict(). The hand goes round
// a segment's buckets, erases entries without rounds, and takes one round from the rest. New entries have one,
// touch()ed entries three: under many insertions the hand may go round at once, and hot entries must outlast it.
//
// No locks: the owner has one. touch() may run beside find(), touch() and visits that change nothing.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace kvpool {

// For maps of hashes that others choose: they must not know the seed.
std::uint64_t random_seed();

class FlatMap {
 public:
  static constexpr std::size_t kBucketEntries = 5;
  static constexpr std::size_t kSegmentBuckets = 512;
  // A secret seed mixes keys, so only chance fills a segment repeatedly; insert() refuses at this many bits.
  static constexpr unsigned kMaxDepth = 24;

  explicit FlatMap(std::uint64_t seed);
  FlatMap(const FlatMap&) = delete;
  FlatMap& operator=(const FlatMap&) = delete;

  // Where a search for a key begins. Valid until the next insert().
  struct Place;

  // Null: absent. The pointer is valid until the next insert() or erase().
  std::uint32_t* find(std::uint64_t key);
  const std::uint32_t* find(std::uint64_t key) const;
  // As find(), and the entry counts as hot.
  std::uint32_t* touch(std::uint64_t key);
  const std::uint32_t* touch(const Place& place, std::uint64_t key) const;
  // (the value's place, whether it is new); a present value stays. Null: no room (kMaxDepth), or a new
  // segment is needed and the map may not grow.
  std::pair<std::uint32_t*, bool> insert(std::uint64_t key, std::uint32_t value, bool may_grow = true);
  bool erase(std::uint64_t key);

  // Prefetches the first cache line of find(key).
  Place prefetch(std::uint64_t key) const;

  // Erases the next cold or is_dead(value) entry of the segment of `key`, after leaves(key, value). False: empty.
  template <typename IsDead, typename Leaves>
  bool evict(std::uint64_t key, IsDead is_dead, Leaves leaves);

  // Calls visit(key, value) for each entry, unordered.
  template <typename Visit>
  void for_each(Visit visit) const;

  // Calls visit(key, value) for the entries of one segment, at `cursor`; moves the cursor to the next segment.
  // From 0 back to 0 it meets every entry that stays in the map. visit may erase its entry, and change nothing
  // else.
  template <typename Visit>
  void visit_segment(std::uint64_t& cursor, Visit visit) const;

  std::size_t size() const { return size_; }
  std::size_t nbytes() const;
  // How many buckets entries are displaced by, in sum; 0 when empty.
  std::uint64_t passes() const;

 private:
  static constexpr unsigned kRoundsOfNew = 1;
  static constexpr unsigned kRoundsOfTouched = 3;

  struct alignas(64) Bucket {
    std::uint64_t key[kBucketEntries];
    std::uint32_t value[kBucketEntries];
    std::uint16_t passed;  // entries that went on from here, or through here
    // Bit i: entry i is present. Above, two bits an entry: its rounds.
    std::uint16_t state;

    bool is_used(std::size_t entry) const { return (state >> entry & 1) != 0; }
    unsigned rounds(std::size_t entry) const { return state >> shift_of(entry) & 3U; }
    void set(std::size_t entry, bool used, unsigned rounds) {
      const unsigned others = state & ~(1U << entry | 3U << shift_of(entry));
      state = static_cast<std::uint16_t>(others | (used ? 1U : 0U) << entry | rounds << shift_of(entry));
    }
    static constexpr std::size_t shift_of(std::size_t entry) { return kBucketEntries + 2 * entry; }
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
    std::uint32_t hand = 0;    // the bucket where evict() goes on
  };

  // A segment's fields for searches, one dependent load nearer.
  struct Entrance {
    Bucket* buckets;
    std::size_t mask;
    Segment* segment;
  };

  // A bijection (the finalizer of MurmurHash3). High bits choose the segment, low bits the bucket.
  std::uint64_t mix(std::uint64_t key) const {
    key ^= seed_;
    key = (key ^ (key >> 33)) * 0xff51afd7ed558ccdULL;
    key = (key ^ (key >> 33)) * 0xc4ceb9fe1a85ec53ULL;
    return key ^ (key >> 33);
  }
  Place locate(std::uint64_t key) const;
  std::size_t directory_index(std::uint64_t mixed) const { return depth_ == 0 ? 0 : mixed >> (64 - depth_); }
  template <bool kTouches = false>
  static std::uint32_t* find_at(const Place& place, std::uint64_t key);

  static std::uint32_t* insert_new(Segment& segment, std::uint64_t mixed, std::uint64_t key,
                                   std::uint32_t value, unsigned rounds);
  bool make_room(std::uint64_t mixed);
  void refill(const Segment& from, Segment& low, Segment& high) const;
  Entrance add_segment(unsigned depth, std::size_t buckets);
  void remove_segment(Segment* segment);

  std::uint64_t seed_;
  unsigned depth_ = 0;  // log2 of the directory's size
  std::size_t segments_nbytes_ = 0;
  std::vector<std::unique_ptr<Segment>> segments_;
  std::vector<Entrance> directory_;  // by the high bits of the mixed key; a segment may be in it many times
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

template <bool kTouches>
std::uint32_t* FlatMap::find_at(const Place& place, std::uint64_t key) {
  std::size_t i = place.bucket;
  do {
    Bucket& bucket = place.buckets[i];
    // Without branches: five mispredictions cost more than five comparisons.
    unsigned equal = 0;
    for (std::size_t entry = 0; entry < kBucketEntries; ++entry) {
      equal |= static_cast<unsigned>(bucket.key[entry] == key) << entry;
    }
    const std::atomic_ref state(bucket.state);  // other readers may touch an entry
    const unsigned seen = state.load(std::memory_order_relaxed);
    equal &= seen;
    if (equal != 0) {
      const auto entry = static_cast<std::size_t>(std::countr_zero(equal));
      if constexpr (kTouches) {
        const unsigned rounds = kRoundsOfTouched << Bucket::shift_of(entry);
        // Read first: writing a cache line takes it from all other readers.
        if ((seen & rounds) != rounds) {
          state.fetch_or(static_cast<std::uint16_t>(rounds), std::memory_order_relaxed);
        }
      }
      return &bucket.value[entry];
    }
    if (bucket.passed == 0) return nullptr;
    i = (i + 1) & place.mask;
  } while (i != place.bucket);  // many erasures may leave every bucket with passed entries
  return nullptr;
}

inline std::uint32_t* FlatMap::find(std::uint64_t key) { return find_at(locate(key), key); }
inline const std::uint32_t* FlatMap::find(std::uint64_t key) const { return find_at(locate(key), key); }

inline std::uint32_t* FlatMap::touch(std::uint64_t key) { return find_at<true>(locate(key), key); }
inline const std::uint32_t* FlatMap::touch(const Place& place, std::uint64_t key) const {
  return find_at<true>(place, key);
}

inline FlatMap::Place FlatMap::prefetch(std::uint64_t key) const {
  const Place place = locate(key);
  __builtin_prefetch(&place.buckets[place.bucket]);
  return place;
}

template <typename Visit>
void FlatMap::visit_segment(std::uint64_t& cursor, Visit visit) const {
  const Segment& segment = *directory_[directory_index(cursor)].segment;
  for (std::size_t i = 0; i <= segment.mask; ++i) {
    Bucket& bucket = segment.buckets[i];
    const unsigned state = std::atomic_ref(bucket.state).load(std::memory_order_relaxed);
    for (std::size_t entry = 0; entry < kBucketEntries; ++entry) {
      if ((state >> entry & 1U) != 0) visit(bucket.key[entry], bucket.value[entry]);
    }
  }
  // The first mixed key behind the segment; wraps to 0 behind the last.
  const unsigned shift = 64 - segment.depth;
  cursor = segment.depth == 0 ? 0 : ((cursor >> shift) + 1) << shift;
}

template <typename IsDead, typename Leaves>
bool FlatMap::evict(std::uint64_t key, IsDead is_dead, Leaves leaves) {
  Segment& segment = *directory_[directory_index(mix(key))].segment;
  // Until all entries are out of rounds, at most.
  for (std::size_t step = 0; step <= kRoundsOfTouched * (segment.mask + 1) + segment.mask; ++step) {
    Bucket& bucket = segment.buckets[segment.hand];
    for (std::size_t entry = 0; entry < kBucketEntries; ++entry) {
      if (!bucket.is_used(entry)) continue;
      if (bucket.rounds(entry) != 0 && !is_dead(bucket.value[entry])) continue;
      leaves(bucket.key[entry], bucket.value[entry]);
      return erase(bucket.key[entry]);  // the hand stays: the bucket may have more
    }
    for (std::size_t entry = 0; entry < kBucketEntries; ++entry) {
      if (bucket.is_used(entry)) bucket.set(entry, true, bucket.rounds(entry) - 1);
    }
    segment.hand = static_cast<std::uint32_t>((segment.hand + 1) & segment.mask);
  }
  return false;
}

template <typename Visit>
void FlatMap::for_each(Visit visit) const {
  std::uint64_t cursor = 0;
  do {
    visit_segment(cursor, visit);
  } while (cursor != 0);
}

}  // namespace kvpool
