#include "index/answer.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "index/packing.h"

namespace kvpool {

using packing::append_column;
using packing::append_text;

namespace {

constexpr std::size_t kDevice = static_cast<std::size_t>(Column::kDevice);
constexpr std::size_t kPool = static_cast<std::size_t>(Column::kPool);
constexpr std::size_t kLocal = static_cast<std::size_t>(Column::kLocal);

}  // namespace

Rows::Rows(std::vector<Row> rows, bool are_all) : rows_(std::move(rows)), are_all_(are_all) {
  for (std::uint32_t i = 0; i < rows_.size(); ++i) {
    const Row& row = rows_[i];
    row_of_.emplace(row.holder, i);
    holders_.push_back(row.holder);
    if (!row.pool.empty()) rows_of_[row.pool].push_back(i);
    if (!row.near.empty()) rows_near_[row.near].push_back(i);
  }
  for (const RowsOf* const shared : {&rows_of_, &rows_near_}) {
    for (const auto& [pool, users] : *shared) holders_.push_back(pool);
  }
  if (rows_.empty()) return;
  for (const Row& row : rows_) append_text(packed_rows_, lookup_response::kWorker, row.worker);
  append_column(packed_rows_, lookup_response::kDpRank, rows_.size(),
                [&](std::size_t i) { return rows_[i].dp_rank; });
  for (const Row& row : rows_) append_text(packed_rows_, lookup_response::kAddress, row.address);
  append_column(packed_rows_, lookup_response::kBlockTokens, rows_.size(),
                [&](std::size_t i) { return rows_[i].block_tokens; });
}

Answer Rows::answer(const Table& table, std::span<const std::byte> hashes, std::int64_t now_ms,
                    Patience patience) const {
  const std::size_t count = rows_.size();
  Answer answer;
  if (count == 0) return answer;
  answer.prompt_blocks = static_cast<std::uint32_t>(hashes.size() / sizeof(std::uint64_t));
  answer.device.resize(count);
  answer.local.resize(count);
  answer.pool.resize(count);
  answer.loadable.resize(count);
  answer.near.resize(count);
  answer.sequences.resize(count);
  answer.staleness_ms.resize(count);
  answer.stale.resize(count);

  std::vector<std::uint64_t> versions(count);
  for (std::size_t i = 0; i < count; ++i) versions[i] = rows_[i].state->version;

  const auto name_of = [this](const RowsOf& shared, std::string Row::* name) {
    if (shared.empty()) return PoolOf();
    return PoolOf([this, name](std::string_view holder) {
      const auto row = row_of_.find(holder);
      return row == row_of_.end() ? std::string_view() : std::string_view(rows_[row->second].*name);
    });
  };
  const Matches matches = table.match(hashes, are_all_ ? nullptr : &holders_, name_of(rows_of_, &Row::pool),
                                      patience, name_of(rows_near_, &Row::near));
  std::vector<bool> found(count);
  for (std::size_t match = 0; match < matches.workers.size(); ++match) {
    const std::string& holder = *matches.workers[match];
    if (const auto row = row_of_.find(holder); row != row_of_.end()) {
      std::uint32_t device = matches.columns[kDevice][match], local = matches.columns[kLocal][match];
      std::uint32_t loadable = matches.loadable.empty() ? local : matches.loadable[match];
      if (!matches.near.empty()) local = matches.near[match];
      if (found[row->second]) {  // its batches named other ranks: this rank has the blocks of all of them
        device = std::min(device, answer.device[row->second]);
        local = std::min(local, answer.local[row->second]);
        loadable = std::min(loadable, answer.loadable[row->second]);
      }
      answer.device[row->second] = device;
      answer.local[row->second] = local;
      answer.loadable[row->second] = loadable;
      found[row->second] = true;
    } else if (const auto users = rows_of_.find(holder); users != rows_of_.end()) {
      for (const std::uint32_t user : users->second) answer.pool[user] = matches.columns[kPool][match];
    } else if (const auto near = rows_near_.find(holder); near != rows_near_.end()) {
      for (const std::uint32_t user : near->second) answer.near[user] = matches.columns[kPool][match];
    }
  }

  for (std::size_t i = 0; i < count; ++i) {
    read_state(i, now_ms, answer);
    const bool moved = (versions[i] & 1) != 0 || rows_[i].state->version != versions[i];
    if (moved && answer.prompt_blocks != 0) answer.moved.push_back(i);
  }
  return answer;
}

void Rows::again(std::size_t row, const Table& table, std::span<const std::byte> hashes, std::int64_t now_ms,
                 Answer& answer, Patience patience) const {
  const std::vector<std::string_view> holder = {rows_[row].holder};
  const auto always = [](const std::string& name) {
    return PoolOf([&name](std::string_view) { return std::string_view(name); });
  };
  const Matches matches =
      table.match(hashes, &holder, always(rows_[row].pool), patience, always(rows_[row].near));
  const auto least = [](const std::vector<std::uint32_t>& blocks) {
    return blocks.empty() ? 0 : std::ranges::min(blocks);
  };
  answer.device[row] = least(matches.columns[kDevice]);
  answer.local[row] = least(matches.near);
  answer.loadable[row] = least(matches.loadable);
  read_state(row, now_ms, answer);
}

void Rows::read_state(std::size_t row, std::int64_t now_ms, Answer& answer) const {
  constexpr std::int64_t kMaxStaleness_ms = std::numeric_limits<std::uint32_t>::max();
  const RankState& state = *rows_[row].state;
  answer.sequences[row] = state.sequence;
  answer.staleness_ms[row] =
      static_cast<std::uint32_t>(std::clamp<std::int64_t>(now_ms - state.heard_at_ms, 0, kMaxStaleness_ms));
  answer.stale[row] = state.stale ? 1 : 0;
  if (answer.stale[row] != 0) answer.device[row] = answer.local[row] = answer.loadable[row] = 0;
  // A rank without local blocks has the pools' alone, as read with the other rows.
  if (answer.stale[row] == 0) answer.local[row] = std::max(answer.local[row], answer.near[row]);
  answer.loadable[row] = std::max({answer.loadable[row], answer.local[row], answer.pool[row]});
}

std::string Rows::pack(const Answer& answer) const {
  const std::size_t count = rows_.size();
  std::string out;
  if (count == 0) return out;
  out.reserve(packed_rows_.size() + count * 30);  // enough, except for sequences of four and more bytes
  out = packed_rows_;
  append_columns(out, count, [&](std::size_t i) { return std::pair(&answer, i); });
  return out;
}

}  // namespace kvpool
