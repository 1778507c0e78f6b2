#include "index/flatmap.h"

#include <algorithm>
#include <bit>
#include <random>

namespace kvpool {
namespace {

constexpr std::size_t kFirstBuckets = 4;

// A segment grows above this: long chains slow searches, and one bucket must stay unpassed.
constexpr std::size_t limit_of(std::size_t capacity) { return capacity - capacity / 8; }

}  // namespace

std::uint64_t random_seed() {
  std::random_device device;
  return std::uint64_t{device()} << 32 | device();
}

FlatMap::FlatMap(std::uint64_t seed) : seed_(seed), directory_{add_segment(0, kFirstBuckets)} {}

FlatMap::Entrance FlatMap::add_segment(unsigned depth, std::size_t buckets) {
  auto segment = std::make_unique<Segment>(depth, buckets);
  segment->owned_at = segments_.size();
  segments_.push_back(std::move(segment));
  segments_nbytes_ += sizeof(Segment) + buckets * sizeof(Bucket);
  Segment* added = segments_.back().get();
  return {added->buckets.get(), added->mask, added};
}

void FlatMap::remove_segment(Segment* segment) {
  segments_nbytes_ -= sizeof(Segment) + (segment->mask + 1) * sizeof(Bucket);
  const std::size_t at = segment->owned_at;
  std::swap(segments_[at], segments_.back());
  segments_[at]->owned_at = at;
  segments_.pop_back();
}

std::size_t FlatMap::nbytes() const {
  return sizeof *this + segments_nbytes_ + directory_.capacity() * sizeof(Entrance) +
         segments_.capacity() * sizeof(void*);
}

std::uint64_t FlatMap::passes() const {
  std::uint64_t passes = 0;
  for (const auto& segment : segments_) {
    for (std::size_t i = 0; i <= segment->mask; ++i) passes += segment->buckets[i].passed;
  }
  return passes;
}

std::pair<std::uint32_t*, bool> FlatMap::insert(std::uint64_t key, std::uint32_t value, bool may_grow) {
  const std::uint64_t mixed = mix(key);
  const Entrance& entrance = directory_[directory_index(mixed)];
  if (std::uint32_t* found = find_at<true>({entrance.buckets, entrance.mask, mixed & entrance.mask}, key)) {
    return {found, false};
  }
  Segment* segment = entrance.segment;
  if (segment->size >= limit_of(segment->capacity())) {
    if (!may_grow || !make_room(mixed)) return {nullptr, false};
    segment = directory_[directory_index(mixed)].segment;
  }
  std::uint32_t* place = insert_new(*segment, mixed, key, value, kRoundsOfNew);
  ++size_;
  return {place, true};
}

std::uint32_t* FlatMap::insert_new(Segment& segment, std::uint64_t mixed, std::uint64_t key,
                                   std::uint32_t value, unsigned rounds) {
  for (std::size_t i = mixed & segment.mask;; i = (i + 1) & segment.mask) {
    Bucket& bucket = segment.buckets[i];
    const auto entry = static_cast<std::size_t>(std::countr_one(bucket.state));
    if (entry < kBucketEntries) {
      bucket.key[entry] = key;
      bucket.value[entry] = value;
      bucket.set(entry, true, rounds);
      ++segment.size;
      return &bucket.value[entry];
    }
    ++bucket.passed;  // at most one per key of the segment: 2,560
  }
}

bool FlatMap::erase(std::uint64_t key) {
  const std::uint64_t mixed = mix(key);
  Segment& segment = *directory_[directory_index(mixed)].segment;
  const std::uint32_t* found = find(key);
  if (found == nullptr) return false;
  for (std::size_t i = mixed & segment.mask;; i = (i + 1) & segment.mask) {
    Bucket& bucket = segment.buckets[i];
    if (found >= bucket.value && found < bucket.value + kBucketEntries) {
      bucket.set(static_cast<std::size_t>(found - bucket.value), false, 0);
      break;
    }
    --bucket.passed;
  }
  --segment.size;
  --size_;
  return true;
}

// Makes the segment of `mixed` larger, or splits it until its part has room.
bool FlatMap::make_room(std::uint64_t mixed) {
  for (;;) {
    Segment* full = directory_[directory_index(mixed)].segment;
    if (full->size < limit_of(full->capacity())) return true;
    const std::size_t buckets = full->mask + 1;
    Entrance low{}, high{};
    if (buckets < kSegmentBuckets) {
      low = high = add_segment(full->depth, buckets * 2);
    } else {
      if (full->depth == kMaxDepth) return false;
      if (full->depth == depth_) {
        // 24 bytes per about 2,000 entries.
        std::vector<Entrance> wider(directory_.size() * 2);
        for (std::size_t i = 0; i < wider.size(); ++i) wider[i] = directory_[i / 2];
        directory_ = std::move(wider);
        ++depth_;
      }
      low = add_segment(full->depth + 1, kSegmentBuckets);
      high = add_segment(full->depth + 1, kSegmentBuckets);
    }
    refill(*full, *low.segment, *high.segment);
    const std::size_t width = std::size_t{1} << (depth_ - full->depth);
    const auto at = directory_.begin() + static_cast<std::ptrdiff_t>(directory_index(mixed) & ~(width - 1));
    std::fill_n(at, width / 2, low);
    std::fill_n(at + static_cast<std::ptrdiff_t>(width / 2), width - width / 2, high);
    remove_segment(full);
  }
}

// `high` gets entries with the next bit set.
void FlatMap::refill(const Segment& from, Segment& low, Segment& high) const {
  for (std::size_t i = 0; i <= from.mask; ++i) {
    const Bucket& bucket = from.buckets[i];
    for (std::size_t entry = 0; entry < kBucketEntries; ++entry) {
      if (!bucket.is_used(entry)) continue;
      const std::uint64_t mixed = mix(bucket.key[entry]);
      Segment& to = (mixed >> (63 - from.depth) & 1) != 0 ? high : low;
      insert_new(to, mixed, bucket.key[entry], bucket.value[entry], bucket.rounds(entry));
    }
  }
}

}  // namespace kvpool
