#include "store/pool_listing.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <iterator>
#include <optional>
#include <string_view>
#include <utility>

#include "store/descriptor.h"
#include "store/pool_directory.h"

namespace kvpool {
namespace {

constexpr std::size_t kHashDigits = 16;  // the last ones: an index's 64 bits

template <typename Number>
std::optional<Number> number(std::string_view text, int base) {
  Number value{};
  const auto [end, error] = std::from_chars(text.begin(), text.end(), value, base);
  if (error != std::errc{} || end != text.end()) return std::nullopt;
  return value;
}

struct Record {
  std::uint32_t group;
  std::uint64_t hash;
  std::uint32_t rank;
  auto operator<=>(const Record&) const = default;
};

// {hash}.{group}.{rank}
std::optional<Record> record(std::string_view name) {
  const std::size_t first = name.find('.'), second = name.find('.', first + 1);
  if (second == std::string_view::npos || first < kHashDigits) return std::nullopt;
  const auto hash = number<std::uint64_t>(name.substr(first - kHashDigits, kHashDigits), 16);
  const auto group = number<std::uint32_t>(name.substr(first + 1, second - first - 1), 10);
  const auto rank = number<std::uint32_t>(name.substr(second + 1), 10);
  if (!hash || !group || !rank) return std::nullopt;
  return Record{*group, *hash, *rank};
}

}  // namespace

PoolListing::PoolListing(std::string root, std::string tenant, std::string name_space,
                         std::size_t most_records)
    : root_(std::move(root)), prefix_(tenant + "." + name_space + "."), most_records_(most_records) {}

std::size_t PoolListing::look() {
  std::vector<Record> records;
  const std::string blocks = root_ + "/blocks";
  const Folder folder = open_folder(AT_FDCWD, blocks.c_str());
  if (!folder && errno != ENOENT) fail("cannot list the pool", blocks, errno);
  std::vector<std::string> buckets;
  if (folder) for_each_entry(folder, [&](std::string_view name) { buckets.emplace_back(name); });
  for (const std::string& bucket : buckets) {
    const Folder held = open_folder(dirfd(folder.get()), bucket.c_str());
    if (!held) continue;  // emptied, and removed
    for_each_entry(held, [&](std::string_view name) {
      if (!name.starts_with(prefix_) || records.size() == most_records_) return;
      if (const auto found = record(name.substr(prefix_.size()))) records.push_back(*found);
    });
  }
  std::ranges::sort(records);
  records.erase(std::unique(records.begin(), records.end()), records.end());
  for (const Record& one : records) {
    std::uint32_t& ranks = ranks_[one.group];
    ranks = std::max(ranks, one.rank + 1);
  }
  seen_.clear();
  for (std::size_t begin = 0, end = 0; begin < records.size(); begin = end) {
    const Record& first = records[begin];
    while (end < records.size() && records[end].group == first.group && records[end].hash == first.hash)
      ++end;
    if (end - begin == ranks_[first.group]) seen_.push_back({first.group, first.hash});
  }
  return seen_.size();
}

std::vector<PoolListing::Change> PoolListing::changes() {
  asked_ = seen_;
  std::map<std::uint32_t, Change> by_group;
  const auto add = [&](const Blocks& blocks, const Blocks& others, auto numbers) {
    Blocks only;
    std::ranges::set_difference(blocks, others, std::back_inserter(only));
    for (const Block& block : only) {
      Change& change = by_group[block.group];
      change.group = block.group;
      (change.*numbers).push_back(block.hash);
    }
  };
  add(asked_, told_, &Change::came);
  add(told_, asked_, &Change::went);
  std::vector<Change> found;
  for (auto& [group, change] : by_group) found.push_back(std::move(change));
  return found;
}

void PoolListing::told() { told_ = asked_; }

void PoolListing::forget() { told_.clear(); }

}  // namespace kvpool
