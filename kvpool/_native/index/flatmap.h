// A hash map of 64-bit keys and 32-bit values that grows a little at a time: extendible hashing over segments
// of at most 32 KiB. A full segment is split in two; nothing ever rehashes the whole map, so the longest pause
// of an insertion is one split (about 20 us), at a thousand entries and at a hundred million.
//
// A bucket is one cache line of five entries. Entries that do not fit go to the next bucket; how many went past
// is counted, so that a search knows where to stop and an erasure leaves no tombstone.
//
// Which entries are cold is kept in bits that a bucket had to spare: how many rounds of the hand an entry survives. The
// hand of evict() goes round the buckets of a segment, erases what survives no more rounds, and takes one from the rest.
// What is new survives one. What is touch()ed survives three: where much is new, the hand may go round at once to find
// something cold, and what is touched all the time must outlast that.
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
  // Keys are mixed with a secret seed, so only chance can fill one segment again and again;
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
  // As find(), and it is not cold from now on.
  std::uint32_t* touch(std::uint64_t key);
  const std::uint32_t* touch(const Place& place, std::uint64_t key) const;
  // (the value's place, whether it is new); a value that is there stays as it is. Null: no room (kMaxDepth), or none
  // without another segment where the map may not grow.
  std::pair<std::uint32_t*, bool> insert(std::uint64_t key, std::uint32_t value, bool may_grow = true);
  bool erase(std::uint64_t key);

  // Has the first cache line that find(key) will look at loaded.
  Place prefetch(std::uint64_t key) const;

  // Erases what is_dead(value) says of one segment, the one at `cursor`, and moves the cursor to the next one; a
  // cursor that starts at 0 and comes back to 0 has met every entry that stayed in the map meanwhile.
  template <typename IsDead>
  void sweep_segment(std::uint64_t& cursor, IsDead is_dead);

  // Erases the next entry of the segment that `key` belongs to that is cold, or of which is_dead(value) says so, and
  // calls leaves(key, value) before. False: the segment is empty.
  template <typename IsDead, typename Leaves>
  bool evict(std::uint64_t key, IsDead is_dead, Leaves leaves);

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
  static constexpr unsigned kRoundsOfNew = 1;
  static constexpr unsigned kRoundsOfTouched = 3;

  struct alignas(64) Bucket {
    std::uint64_t key[kBucketEntries];
    std::uint32_t value[kBucketEntries];
    std::uint16_t passed;  // entries that were sent on from here, by this bucket or to it from one before
    // Bit i: entry i is there. Above, two bits an entry: rounds of the hand that it survives.
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

template <bool kTouches>
std::uint32_t* FlatMap::find_at(const Place& place, std::uint64_t key) {
  std::size_t i = place.bucket;
  do {
    Bucket& bucket = place.buckets[i];
    // Without branches: which entry it is cannot be predicted, and five guesses cost more than five comparisons.
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
        // Looked at first: a line that one reader writes is taken from all others.
        if ((seen & rounds) != rounds) {
          state.fetch_or(static_cast<std::uint16_t>(rounds), std::memory_order_relaxed);
        }
      }
      return &bucket.value[entry];
    }
    if (bucket.passed == 0) return nullptr;
    i = (i + 1) & place.mask;
  } while (i != place.bucket);  // many erasures may leave every bucket passed by something
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
    Bucket& bucket = segment.buckets[i];
    const unsigned state = std::atomic_ref(bucket.state).load(std::memory_order_relaxed);
    for (std::size_t entry = 0; entry < kBucketEntries; ++entry) {
      if ((state >> entry & 1U) != 0) visit(bucket.key[entry], bucket.value[entry]);
    }
  }
  // The first mixed key behind the segment; wraps to 0 behind the last one.
  const unsigned shift = 64 - segment.depth;
  cursor = segment.depth == 0 ? 0 : ((cursor >> shift) + 1) << shift;
}

template <typename IsDead, typename Leaves>
bool FlatMap::evict(std::uint64_t key, IsDead is_dead, Leaves leaves) {
  Segment& segment = *directory_[directory_index(mix(key))].segment;
  // Until all have come to the end of their rounds, at most.
  for (std::size_t step = 0; step <= kRoundsOfTouched * (segment.mask + 1) + segment.mask; ++step) {
    Bucket& bucket = segment.buckets[segment.hand];
    for (std::size_t entry = 0; entry < kBucketEntries; ++entry) {
      if (!bucket.is_used(entry)) continue;
      if (bucket.rounds(entry) != 0 && !is_dead(bucket.value[entry])) continue;
      leaves(bucket.key[entry], bucket.value[entry]);
      return erase(bucket.key[entry]);  // the hand stays: there may be more of them
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
