// Answers about a prompt: a row for every candidate rank, packed as LookupResponse
// (protos/kvpool/v1/index.proto).
//
// A row is true as of its sequence. A writer of a rank's blocks makes its version odd before and even after,
// under the rank's lock, which is the caller's. answer() reads versions, table, states and versions again.
// Ranks whose version moved or was odd are in Answer::moved; again() reads them under their locks
// (docs/decisions/0026-check-answers-by-version.md).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "index/packing.h"
#include "index/table.h"

namespace kvpool {

// A rank's state beside its blocks. Any thread reads; one at a time writes.
struct RankState {
  std::atomic<std::uint64_t> version{0};  // odd: a change is under way
  std::atomic<std::uint64_t> sequence{0};
  std::atomic<std::int64_t> heard_at_ms{0};
  std::atomic<bool> stale{true};
  std::atomic<bool> has_feed{false};  // it publishes events, so silence means something
};

namespace lookup_response {
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
  kLoadableBlocks,
  kPoolMedia = 16,
};
}  // namespace lookup_response

// Columns: one number a row.
struct Answer {
  std::uint32_t prompt_blocks = 0;
  std::vector<std::uint32_t> device, local, pool, loadable;  // local: with the near pool
  std::vector<std::uint32_t> near;                           // leading blocks in the near pool
  std::vector<std::uint64_t> sequences;
  std::vector<std::uint32_t> staleness_ms;
  std::vector<std::uint8_t> stale;
  std::vector<std::size_t> moved;  // rows to read again
};

// Appends the columns of a LookupResponse that a prompt changes: at(i) is row i's answer, and its place there.
template <typename At>
void append_columns(std::string& out, std::size_t rows, At at) {
  const auto column = [&](lookup_response::Field field, auto numbers) {
    packing::append_column(out, field, rows, [&](std::size_t i) {
      const auto [answer, row] = at(i);
      return std::uint64_t{(answer->*numbers)[row]};
    });
  };
  using enum lookup_response::Field;
  packing::append_column(out, kPromptBlocks, rows, [&](std::size_t i) { return at(i).first->prompt_blocks; });
  column(kDeviceBlocks, &Answer::device);
  column(kLocalBlocks, &Answer::local);
  column(kPoolBlocks, &Answer::pool);
  column(kSequence, &Answer::sequences);
  column(kStalenessMs, &Answer::staleness_ms);
  column(kStale, &Answer::stale);
  column(kLoadableBlocks, &Answer::loadable);
}

// The ranks of an answer, in its order. Immutable.
class Rows {
 public:
  struct Row {
    std::string worker;
    std::uint32_t dp_rank;
    std::string address;
    std::uint32_t block_tokens;
    std::string holder;  // the rank's name in the table
    std::string pool;    // holder of its loadable pool blocks; empty: none
    std::string near;    // of those in its host's near pool
    const RankState* state;
  };

  // are_all: all ranks of the table, up to joins and leaves of the moment.
  Rows(std::vector<Row> rows, bool are_all);

  std::size_t size() const { return rows_.size(); }
  const Row& operator[](std::size_t row) const { return rows_[row]; }

  // hashes: packed 64-bit integers. now_ms: by the clock of heard_at_ms. Throws as Table::match().
  Answer answer(const Table& table, std::span<const std::byte> hashes, std::int64_t now_ms,
                Patience patience = Patience::kFull) const;
  // Reads one row again, under the lock of its rank.
  void again(std::size_t row, const Table& table, std::span<const std::byte> hashes, std::int64_t now_ms,
             Answer& answer, Patience patience = Patience::kFull) const;
  // A serialized LookupResponse.
  std::string pack(const Answer& answer) const;

 private:
  void read_state(std::size_t row, std::int64_t now_ms, Answer& answer) const;

  std::vector<Row> rows_;
  bool are_all_;
  std::unordered_map<std::string_view, std::uint32_t> row_of_;  // by holder
  using RowsOf = std::unordered_map<std::string_view, std::vector<std::uint32_t>>;
  RowsOf rows_of_, rows_near_;             // by pool, by near pool
  std::vector<std::string_view> holders_;  // and pools
  std::string packed_rows_;                // the fields that no prompt changes; they come first
};

}  // namespace kvpool
