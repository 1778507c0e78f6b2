// Spells a lookup's keys, and decides which are still worth asking.
#include "store/lookup.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <stdexcept>
#include <string>

namespace kvpool {
namespace {

constexpr std::size_t kMinHashNbytes = 8;
constexpr std::size_t kMaxHashNbytes = 64;
constexpr std::uint32_t kMaxRanks = 65'536;

void check(const LookupGroup& group) {
  if (group.hash_nbytes < kMinHashNbytes || group.hash_nbytes > kMaxHashNbytes) {
    throw std::invalid_argument("a block hash is 8 to 64 bytes long");
  }
  if (group.hashes.size() % group.hash_nbytes != 0) {
    throw std::invalid_argument("packed hashes are a multiple of one hash's bytes");
  }
  if (group.ranks < 1 || group.ranks > kMaxRanks) throw std::invalid_argument("ranks must be 1 to 65536");
  if (group.record_tokens < 1) throw std::invalid_argument("record_tokens must be at least 1");
}

}  // namespace

Lookup::Lookup(std::string_view prefix, const std::vector<LookupGroup>& groups)
    : prefix_(parse_key(std::string(prefix) + std::string(2 * kMinHashNbytes, '0') + ":0:0")) {
  prefix_.text = prefix;
  for (const LookupGroup& group : groups) {
    check(group);
    const std::size_t records = group.hashes.size() / group.hash_nbytes;
    const std::size_t end_key = key_count_ + records * group.ranks;
    places_.push_back({group, key_count_, end_key, record_count_});
    key_count_ = end_key;
    record_count_ += records;
  }
}

const Lookup::Place& Lookup::place_of(std::size_t index) const {
  assert(index < key_count_);
  return *std::find_if(places_.begin(), places_.end(), [&](const Place& one) { return index < one.end_key; });
}

Key Lookup::key(std::size_t index) const {
  constexpr std::string_view kDigits = "0123456789abcdef";
  const Place& place = place_of(index);
  const LookupGroup& group = place.records;
  const std::size_t in_group = index - place.first_key;
  const std::size_t record = in_group / group.ranks;
  const std::string_view hash = group.hashes.substr(record * group.hash_nbytes, group.hash_nbytes);
  Key key = prefix_;
  key.group = group.group;
  key.rank = static_cast<std::uint16_t>(in_group % group.ranks);
  key.hash_prefix = {};
  const std::size_t kept = std::min(hash.size(), key.hash_prefix.size());
  std::copy_n(reinterpret_cast<const std::uint8_t*>(hash.data()), kept, key.hash_prefix.begin());
  key.text.reserve(prefix_.text.size() + 2 * hash.size() + 12);  // ":65535:65535"
  for (const char c : hash) {
    const auto byte = static_cast<unsigned char>(c);
    key.text += kDigits[byte >> 4];
    key.text += kDigits[byte & 15];
  }
  key.hash_end = static_cast<std::uint32_t>(key.text.size());
  key.text += ':';
  key.text += std::to_string(key.group);
  key.text += ':';
  key.text += std::to_string(key.rank);
  return key;
}

std::size_t Lookup::record_of(std::size_t index) const {
  if (index == key_count_) return record_count_;
  const Place& place = place_of(index);
  return place.first_record + (index - place.first_key) / place.records.ranks;
}

std::size_t Lookup::next_wanted(std::size_t index) const {
  const std::uint64_t end_tokens = end_tokens_.load(std::memory_order_relaxed);
  while (index < key_count_) {
    const Place& place = place_of(index);
    const std::uint64_t record = (index - place.first_key) / place.records.ranks;
    if (record < end_tokens / place.records.record_tokens) return index;
    index = place.end_key;
  }
  return index;
}

void Lookup::missed(std::size_t index) {
  const Place& place = place_of(index);
  if (place.records.sliding_window) return;
  const std::uint64_t record = (index - place.first_key) / place.records.ranks;
  const std::uint64_t end_tokens = record * place.records.record_tokens;
  std::uint64_t known = end_tokens_.load(std::memory_order_relaxed);
  while (end_tokens < known &&
         !end_tokens_.compare_exchange_weak(known, end_tokens, std::memory_order_relaxed)) {
  }
}

}  // namespace kvpool
