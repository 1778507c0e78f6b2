// Spans of blocks that are held, and what several of them have in common.
#include "index/spans.h"

#include <algorithm>
#include <cstring>

namespace kvpool {

void keep_common(Spans& spans, const Spans& others) {
  Spans common;
  auto mine = spans.begin();
  auto other = others.begin();
  while (mine != spans.end() && other != others.end()) {
    const Span both = {std::max(mine->first, other->first), std::min(mine->last, other->last)};
    if (both.first <= both.last) common.push_back(both);
    if (mine->last < other->last) {
      ++mine;
    } else {
      ++other;
    }
  }
  spans = std::move(common);
}

std::uint64_t longest(const Spans& spans, std::uint64_t unit) {
  for (auto span = spans.rbegin(); span != spans.rend(); ++span) {
    const std::uint64_t length = span->last / unit * unit;
    if (length >= span->first) return length;
  }
  return 0;
}

void add_held(Spans& spans, std::uint64_t begin, std::uint64_t end, std::uint32_t last,
              std::uint32_t stride) {
  if (begin != 0 && last == 0) return;
  // What goes back to the beginning is enough, however short.
  const std::uint64_t first = begin == 0 ? 1 : begin + last;
  if (first <= end) spans.push_back({first * stride, end * stride});
}

SetRuns::SetRuns(const FlatMap& blocks, std::span<const std::byte> hashes, std::uint32_t stride)
    : blocks_(&blocks),
      hashes_(hashes),
      stride_(stride),
      count_(hashes.size() / sizeof(std::uint64_t) / stride) {
  for (std::uint64_t i = 0; i < std::min<std::uint64_t>(count_, kAhead); ++i) {
    places_[i] = blocks_->prefetch(hash_at(i));
  }
  if (count_ != 0) waiting_ = next_set();
}

const SetRuns::Run* SetRuns::at(std::size_t index) {
  while (runs_.size() <= index) {
    const std::uint64_t begun = runs_.empty() ? 0 : runs_.back().end;
    if (begun == count_) return nullptr;
    const SetId set = waiting_;
    std::uint64_t end = begun + 1;
    while (end < count_ && (waiting_ = next_set()) == set) ++end;
    runs_.push_back({set, end});
  }
  return &runs_[index];
}

std::uint64_t SetRuns::hash_at(std::uint64_t block) const {
  std::uint64_t hash;
  std::memcpy(&hash, hashes_.data() + ((block + 1) * stride_ - 1) * sizeof hash, sizeof hash);
  return hash;
}

SetId SetRuns::next_set() {
  FlatMap::Place& place = places_[read_ % kAhead];
  const std::uint32_t* set = blocks_->touch(place, hash_at(read_));
  if (read_ + kAhead < count_) place = blocks_->prefetch(hash_at(read_ + kAhead));
  ++read_;
  return set == nullptr ? kNobody : *set;
}

}  // namespace kvpool
