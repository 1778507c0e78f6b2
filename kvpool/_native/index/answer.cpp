#include "index/answer.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace kvpool {
namespace {

constexpr std::size_t kDevice = static_cast<std::size_t>(Column::kDevice);
constexpr std::size_t kPool = static_cast<std::size_t>(Column::kPool);
constexpr std::size_t kLocal = static_cast<std::size_t>(Column::kLocal);

// Fields of LookupResponse.
enum Field : unsigned {
  kWorker = 1,
  kDpRank,
  kAddress,
  kBlockTokens,
  kPromptBlocks,
  kDeviceBlocks,
  kLocalBlocks,
  kPoolBlocks,
  kSequence,
  kStalenessMs,
  kStale,
};

void append_varint(std::string& out, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  out += static_cast<char>(value);
}

void append_tag(std::string& out, Field field) { out += static_cast<char>(field << 3 | 2); }

void append_text(std::string& out, Field field, std::string_view text) {
  append_tag(out, field);
  append_varint(out, text.size());
  out += text;
}

std::size_t varint_nbytes(std::uint64_t value) {
  std::size_t nbytes = 1;
  for (; value >= 0x80; value >>= 7) ++nbytes;
  return nbytes;
}

// Packed numbers, at least one; number(i) is row i's.
template <typename Number>
void append_column(std::string& out, Field field, std::size_t rows, Number number) {
  std::size_t nbytes = 0;
  for (std::size_t i = 0; i < rows; ++i) nbytes += varint_nbytes(number(i));
  append_tag(out, field);
  append_varint(out, nbytes);
  for (std::size_t i = 0; i < rows; ++i) append_varint(out, number(i));
}

}  // namespace

Rows::Rows(std::vector<Row> rows, bool are_all) : rows_(std::move(rows)), are_all_(are_all) {
  for (std::uint32_t i = 0; i < rows_.size(); ++i) {
    const Row& row = rows_[i];
    row_of_.emplace(row.holder, i);
    holders_.push_back(row.holder);
    if (!row.pool.empty()) rows_of_[row.pool].push_back(i);
  }
  for (const auto& [pool, users] : rows_of_) holders_.push_back(pool);
  if (rows_.empty()) return;
  for (const Row& row : rows_) append_text(packed_rows_, kWorker, row.worker);
  append_column(packed_rows_, kDpRank, rows_.size(), [&](std::size_t i) { return rows_[i].dp_rank; });
  for (const Row& row : rows_) append_text(packed_rows_, kAddress, row.address);
  append_column(packed_rows_, kBlockTokens, rows_.size(),
                [&](std::size_t i) { return rows_[i].block_tokens; });
}

Answer Rows::answer(const Table& table, std::span<const std::byte> hashes, std::int64_t now_ms) const {
  const std::size_t count = rows_.size();
  Answer answer;
  if (count == 0) return answer;
  answer.prompt_blocks = static_cast<std::uint32_t>(hashes.size() / sizeof(std::uint64_t));
  answer.device.resize(count);
  answer.local.resize(count);
  answer.pool.resize(count);
  answer.sequences.resize(count);
  answer.staleness_ms.resize(count);
  answer.stale.resize(count);

  std::vector<std::uint64_t> versions(count);
  for (std::size_t i = 0; i < count; ++i) versions[i] = rows_[i].state->version;

  const Matches matches = table.match(hashes, are_all_ ? nullptr : &holders_);
  std::vector<bool> found(count);
  for (std::size_t match = 0; match < matches.workers.size(); ++match) {
    const std::string& holder = *matches.workers[match];
    if (const auto row = row_of_.find(holder); row != row_of_.end()) {
      std::uint32_t device = matches.columns[kDevice][match], local = matches.columns[kLocal][match];
      if (found[row->second]) {  // its batches have named other ranks: it has what all of them have
        device = std::min(device, answer.device[row->second]);
        local = std::min(local, answer.local[row->second]);
      }
      answer.device[row->second] = device;
      answer.local[row->second] = local;
      found[row->second] = true;
    } else if (const auto users = rows_of_.find(holder); users != rows_of_.end()) {
      for (const std::uint32_t user : users->second) answer.pool[user] = matches.columns[kPool][match];
    }
  }

  for (std::size_t i = 0; i < count; ++i) {
    read_state(i, now_ms, answer);
    if ((versions[i] & 1) != 0 || rows_[i].state->version != versions[i]) answer.moved.push_back(i);
  }
  return answer;
}

void Rows::again(std::size_t row, const Table& table, std::span<const std::byte> hashes, std::int64_t now_ms,
                 Answer& answer) const {
  const std::vector<std::string_view> holder = {rows_[row].holder};
  const Matches matches = table.match(hashes, &holder);
  const auto least = [&](std::size_t column) {
    const std::vector<std::uint32_t>& blocks = matches.columns[column];
    return blocks.empty() ? 0 : std::ranges::min(blocks);
  };
  answer.device[row] = least(kDevice);
  answer.local[row] = least(kLocal);
  read_state(row, now_ms, answer);
}

void Rows::read_state(std::size_t row, std::int64_t now_ms, Answer& answer) const {
  constexpr std::int64_t kMaxStaleness_ms = std::numeric_limits<std::uint32_t>::max();
  const RankState& state = *rows_[row].state;
  answer.sequences[row] = state.sequence;
  answer.staleness_ms[row] =
      static_cast<std::uint32_t>(std::clamp<std::int64_t>(now_ms - state.heard_at_ms, 0, kMaxStaleness_ms));
  answer.stale[row] = state.stale ? 1 : 0;
  if (answer.stale[row] != 0) answer.device[row] = answer.local[row] = 0;
}

std::string Rows::pack(const Answer& answer) const {
  const std::size_t count = rows_.size();
  std::string out;
  if (count == 0) return out;
  out.reserve(packed_rows_.size() + count * 28);  // enough but for sequences of four and more bytes
  out = packed_rows_;
  const auto column = [&](Field field, const auto& numbers) {
    append_column(out, field, count, [&](std::size_t i) { return numbers[i]; });
  };
  append_column(out, kPromptBlocks, count, [&](std::size_t) { return answer.prompt_blocks; });
  column(kDeviceBlocks, answer.device);
  column(kLocalBlocks, answer.local);
  column(kPoolBlocks, answer.pool);
  column(kSequence, answer.sequences);
  column(kStalenessMs, answer.staleness_ms);
  column(kStale, answer.stale);
  return out;
}

}  // namespace kvpool
