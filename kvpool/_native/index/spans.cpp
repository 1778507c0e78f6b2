#include "index/spans.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace kvpool {
namespace {

std::uint64_t hash_at(const std::byte* hashes, std::uint64_t place) {
  std::uint64_t hash;
  std::memcpy(&hash, hashes + place * sizeof hash, sizeof hash);
  return hash;
}

}  // namespace

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
  // A prefix from the beginning is enough, however short.
  const std::uint64_t first = begin == 0 ? 1 : begin + last;
  if (first <= end) spans.push_back({first * stride, end * stride});
}

void check_circles(std::span<const std::byte> hashes) {
  const std::size_t count = hashes.size() / sizeof(std::uint64_t);
  for (std::size_t anchor = 0; anchor < count; anchor = 2 * anchor + 1) {
    const std::uint64_t first = hash_at(hashes.data(), anchor);
    const std::size_t end = std::min(count, 2 * anchor + 2);
    bool found = false;  // without branches, so that several are compared at once
    for (std::size_t block = anchor + 1; block < end; ++block)
      found |= hash_at(hashes.data(), block) == first;
    if (found) {
      throw std::invalid_argument("a prompt's block hashes are all different: that of block " +
                                  std::to_string(anchor) + " comes again");
    }
  }
}

SetRuns::SetRuns(const FlatMap& blocks, std::span<const std::byte> hashes, std::uint32_t stride)
    : blocks_(&blocks),
      hashes_(hashes),
      stride_(stride),
      count_(hashes.size() / sizeof(std::uint64_t) / stride) {
  for (std::uint64_t i = 0; i < std::min<std::uint64_t>(count_, kAhead); ++i) {
    places_[i] = blocks_->prefetch(hash_at(hashes_.data(), (i + 1) * stride_ - 1));
  }
}

const SetRuns::Run* SetRuns::at(std::size_t index) {
  while (runs_.size() <= index) {
    if (!read_next()) return nullptr;
  }
  return &runs_[index];
}

std::size_t SetRuns::index_of(std::uint64_t block) {
  while (read_ <= block && read_next()) {
  }
  const auto behind = std::ranges::upper_bound(runs_, block, {}, &Run::begin);
  return static_cast<std::size_t>(behind - runs_.begin()) - 1;
}

// False: all blocks were read, and no run follows.
bool SetRuns::read_next() {
  constexpr SetId kNoSet = ~SetId{0};
  const SetId last = runs_.empty() ? kNoSet : runs_.back().set;
  const FlatMap& blocks = *blocks_;
  const std::uint64_t count = count_;
  // `places` aliases nothing: the map's fields stay in registers.
  FlatMap::Place* __restrict const places = places_.data();
  const auto last_of = [hashes = hashes_.data(), stride = stride_](std::uint64_t block) {
    return hash_at(hashes, (block + 1) * stride - 1);
  };
  for (std::uint64_t block = read_; block < count; ++block) {
    FlatMap::Place& place = places[block % kAhead];
    const std::uint32_t* found = blocks.touch(place, last_of(block));
    if (block + kAhead < count) place = blocks.prefetch(last_of(block + kAhead));
    const SetId set = found == nullptr ? kNobody : *found;
    if (set == last) continue;
    runs_.push_back({set, block});
    read_ = block + 1;
    return true;
  }
  read_ = count;
  return false;
}

SetRuns& Walk::runs(std::uint32_t stride) {
  if (stride == 1) return runs_;
  return larger_.try_emplace(stride, *blocks_, hashes_, stride).first->second;
}

void Walk::refuse() const {
  if (patience_ == Patience::kAtOnce) throw NotAtOnce();
  throw TooMuchWork(
      "too many workers hold too many different parts of this prompt: name candidates, or ask for a "
      "shorter part of it");
}

}  // namespace kvpool
