// What an index answers about a prompt: a row for every rank that is asked about, and LookupResponse packed from them
// (protos/kvpool/v1/index.proto).
//
// A row is true as of its sequence. A writer of what a rank holds makes its version odd before and even after, under
// the rank's lock, which is not known here. answer() reads the versions, asks the table, reads the states and reads the
// versions again; ranks whose version moved or was odd are in Answer::moved, and are asked again() under their locks
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
#include <vector>

#include "index/table.h"

namespace kvpool {

// What an index knows of a rank beside its blocks. Read by any thread, written by one at a time.
struct RankState {
  std::atomic<std::uint64_t> version{0};  // odd: a change is under way
  std::atomic<std::uint64_t> sequence{0};
  std::atomic<std::int64_t> heard_at_ms{0};
  std::atomic<bool> stale{true};
  std::atomic<bool> has_feed{false};  // it publishes what it holds, so that silence says something
};

// Fields of LookupResponse.
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
};
}  // namespace lookup_response

// Columns: one number a row.
struct Answer {
  std::uint32_t prompt_blocks = 0;
  std::vector<std::uint32_t> device, local, pool, loadable;
  std::vector<std::uint64_t> sequences;
  std::vector<std::uint32_t> staleness_ms;
  std::vector<std::uint8_t> stale;
  std::vector<std::size_t> moved;  // rows that may not belong together yet
};

// The ranks of an answer, in its order. Immutable.
class Rows {
 public:
  struct Row {
    std::string worker;
    std::uint32_t dp_rank;
    std::string address;
    std::uint32_t block_tokens;
    std::string holder;  // the rank's name in the table
    std::string pool;    // the name of what it can load from the pool; empty: nothing
    const RankState* state;
  };

  // are_all: these are all ranks of the table, but for some that joined or left just now.
  Rows(std::vector<Row> rows, bool are_all);

  std::size_t size() const { return rows_.size(); }
  const Row& operator[](std::size_t row) const { return rows_[row]; }

  // hashes: packed 64-bit integers. now_ms: by the clock of heard_at_ms. Throws as Table::match().
  Answer answer(const Table& table, std::span<const std::byte> hashes, std::int64_t now_ms,
                Patience patience = Patience::kFull) const;
  // One row of the answer once more, under the lock of its rank.
  void again(std::size_t row, const Table& table, std::span<const std::byte> hashes, std::int64_t now_ms,
             Answer& answer, Patience patience = Patience::kFull) const;
  // As protobuf serializes a LookupResponse of it.
  std::string pack(const Answer& answer) const;

 private:
  void read_state(std::size_t row, std::int64_t now_ms, Answer& answer) const;

  std::vector<Row> rows_;
  bool are_all_;
  std::unordered_map<std::string_view, std::uint32_t> row_of_;                // by holder
  std::unordered_map<std::string_view, std::vector<std::uint32_t>> rows_of_;  // by pool
  std::vector<std::string_view> holders_;                                     // and pools
  std::string packed_rows_;  // the fields that are the same in every answer; they come first
};

}  // namespace kvpool
