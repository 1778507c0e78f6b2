// The prefix index: which worker holds which block, by the engine's own 64-bit block hash, and how far a prompt's
// leading blocks reach with each of them.
//
// It never asks for a block's parent or its tokens, so holes, refills and events without tokens are all the same.
//
// How copies are counted (docs/decisions/0024-never-credit-above-the-engine.md): on the device tier a stored event adds
// one physical copy of each of its blocks and a removed event takes one away, but a stored event from the root of
// a prompt adds none of a block that is held: it may be a report of reused blocks. So no block is ever counted
// more often than the engine has it. On the other tiers a block is there or is not.
//
// A rank with one kind of group, which needs the whole prefix, is scored as the prompt is walked along. One with other
// groups, too (sliding windows, states, larger blocks) is scored by what all of them could go on from (spans.h).
// Of such a group a stored event from the root of a prompt is believed only as far as a report would be true
// (docs/decisions/0024-never-credit-above-the-engine.md).
//
// Who can list what a worker has in the pool settles the table with it in three steps
// (docs/decisions/0029-mark-and-sweep-the-pool.md): doubt() everything the table credits, apply() what was listed
// as stored events, expel() what is still in doubt. Any stored event ends the doubt about its blocks.
//
// A full table (max_blocks, or its MemoryBudget) makes room by forgetting cold blocks, those that were neither stored
// nor asked for in a while, with all that is known of them (docs/decisions/0025-split-segments-evict-by-clock.md).
// Counts then are below the engine's, never above: from none they go up and down with its events.
//
// Any thread may call anything. One lock: match(), workers() and stats() share it, all others hold it alone.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "index/events.h"
#include "index/flatmap.h"
#include "index/holders.h"
#include "index/memory_budget.h"
#include "index/spans.h"
#include "index/table_image.h"

namespace kvpool {

// What happened to block hashes, one by one; events where it says so.
struct Applied {
  std::uint64_t stored = 0;    // new at this holder
  std::uint64_t copied = 0;    // one more physical copy of what it holds
  std::uint64_t repeated = 0;  // told again: nothing changed
  std::uint64_t removed = 0;   // gone from this holder
  std::uint64_t uncopied = 0;  // one physical copy less, others are left
  std::uint64_t unknown = 0;   // removed, but this holder did not have it
  std::uint64_t refused = 0;   // stored, but there is no room for it
  std::uint64_t doubted = 0;   // stored, but perhaps only a report of what is gone: not believed
  std::uint64_t cleared_events = 0;
  std::uint64_t skipped_events = 0;    // of an unknown type or in an unknown medium
  std::uint64_t evicted = 0;           // cold blocks, of any worker, that left to make room
  std::uint64_t lookahead_events = 0;  // with hashes that no prompt has (EventBatch)

  Applied& operator+=(const Applied& other);
};

// Leading blocks of a prompt, counted for each of these: every tier by itself, then unions of tiers, in which
// each block may be in another one.
enum class Column : std::uint8_t { kDevice, kHost, kDisk, kPool, kLocal, kAny, kMemory };
inline constexpr std::size_t kColumnCount = 7;

struct Matches {
  std::vector<std::shared_ptr<const std::string>> workers;  // by row
  std::vector<std::uint32_t> dp_ranks;
  std::array<std::vector<std::uint32_t>, kColumnCount> columns;
  // How far a worker comes with what it holds itself (kLocal) and, from there on, its part of the pool. Only where
  // match() was told of pools.
  std::vector<std::uint32_t> loadable;
};

// Under which name a worker's part of the pool is held, which must live as long as the call; empty: it has none.
using PoolOf = std::function<std::string_view(std::string_view worker)>;

// Blocks that are held in each tier, by Tier.
using TierBlocks = std::array<std::uint64_t, kTierCount>;

struct TableStats {
  Applied applied;  // by all batches
  std::uint64_t batches = 0;
  std::uint64_t blocks = 0;       // with a holder
  std::uint64_t holder_sets = 0;  // different sets of holders in use
  std::uint64_t workers = 0;
  std::uint64_t holders = 0;  // (worker, rank, group)s
  std::uint64_t copies = 0;   // blocks at a holder that has more than one physical copy
  std::uint64_t unswept = 0;  // places of blocks without a holder
  std::uint64_t nbytes = 0;
  TierBlocks tier_blocks{};  // of all holders: a block counts once for each
};

// What one worker holds, comparable between tables: the same for the same holdings, however they came about.
struct Content {
  std::uint64_t digest = 0;  // of every block, its rank, group, tier and number of copies; 0: nothing
  std::uint64_t blocks = 0;  // counted once for each rank, group and tier that has it
};

class Table {
 public:
  static constexpr std::size_t kMaxBlocks = std::size_t{1} << 32;
  static constexpr std::size_t kMaxWorkerNbytes = 256;

  // Blocks beyond max_blocks make others leave. Without reuse_reports, events from the root are believed, and add
  // copies, like all others, which is exact as long as no engine reports reused blocks. block_tokens: of a block that is
  // hashed; 0: not known, and groups are taken to have blocks of that size. budget: what all tables that share it may
  // take; null: no limit.
  Table(std::size_t max_blocks, bool reuse_reports, std::uint32_t block_tokens = 0,
        std::shared_ptr<MemoryBudget> budget = nullptr);
  // What was in another table. Blocks for which there is no room are refused, and counted; their holders are told to be
  // short of them as of evicted() ones. Throws DamagedImage.
  Table(std::size_t max_blocks, bool reuse_reports, std::uint32_t block_tokens,
        std::shared_ptr<MemoryBudget> budget, const TableImage& image);
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  // All of the batch, in its order; a match() sees all of it or nothing. default_rank: where the batch names none.
  // pool: who holds what the batch says of the pool tier, as its rank 0; none: the worker itself.
  // Throws ClearedTooOften for a batch that takes what is held away more than kMaxDrops times: then the worker holds
  // nothing any more.
  Applied apply(std::string_view worker, std::uint32_t default_rank, const EventBatch& batch,
                std::optional<std::string_view> pool = std::nullopt);

  // Rows: the ranks (of `workers` only, if given) that hold the first block in some tier, in no particular order.
  // Throws std::invalid_argument for a prompt that goes in circles, TooMuchWork when others would wait for too long,
  // NotAtOnce where there is not so much patience.
  Matches match(std::span<const std::byte> hashes, const std::vector<std::string_view>* workers,
                const PoolOf& pool_of = nullptr, Patience patience = Patience::kFull) const;

  // False: not known.
  bool remove_worker(std::string_view worker);
  bool clear(std::string_view worker, std::optional<std::uint32_t> dp_rank, Tiers tiers);

  // Doubts the blocks that the worker holds in the pool, in one segment of the table: begins with cursor 0, and
  // returns the next one, 0 after the last. Doubts of an earlier round end when a round begins.
  std::uint64_t doubt(std::string_view worker, std::uint64_t cursor);
  // Takes some doubted blocks from the worker's part of the pool: (how many it held, how many doubts are left).
  std::pair<std::size_t, std::size_t> expel(std::string_view worker);

  // Holdings of this worker that were evicted since they were last cleared; 0: none, or not known.
  std::uint64_t evicted(std::string_view worker) const;

  std::vector<std::string> workers() const;
  TierBlocks held_by(std::string_view worker) const;  // by all its ranks and groups; not known: nothing
  // Nothing: not known.
  std::optional<Content> content(std::string_view worker) const;
  TableStats stats() const;
  // Everything but the totals of batches. Readers go on meanwhile: about 10 ms for a million blocks.
  TableImage image() const;

 private:
  static constexpr std::size_t kMaxRanks = 1024;  // of a worker
  static constexpr std::size_t kMaxGroups = 256;  // of a rank
  static constexpr std::size_t kMaxWorkers = 65536;
  // Cache lines on their way while one block is looked at: enough to hide a miss of the last cache.
  static constexpr std::size_t kAhead = 16;
  // Of one batch, each a walk over all sets: 5 ms for a million of them. An engine clears once in a batch, and its
  // groups keep their kinds; who stores and clears in turns would hold up all others for as long as a batch is large.
  static constexpr unsigned kMaxDrops = 16;
  // One segment is swept for so many hashes of a batch, and one more for the batch.
  static constexpr std::size_t kHashesPerSweep = 1024;

  struct Doubts {
    explicit Doubts(std::uint64_t seed) : blocks(seed) {}
    FlatMap blocks;
    std::uint64_t cursor = 0;  // of expel()
  };
  // What a holder is, needs and has: one KV-cache group of one rank.
  struct GroupHolder {
    std::uint32_t rank = 0;
    std::uint32_t group = 0;
    bool in_use = false;
    bool uniform = true;       // as its rank
    bool partial = false;      // engines may report blocks of it that are gone
    std::uint32_t last = 0;    // blocks at the end of a prefix that it needs; 0: all
    std::uint32_t stride = 1;  // hashed blocks in a block of the group
    std::uint64_t evicted = 0;
    TierBlocks blocks{};
    std::array<std::uint64_t, kTierCount>
        digests{};  // sums over blocks and copies: a change costs one addition
    std::unique_ptr<FlatMap>
        more_copies;                 // on the device, beyond the first: number by block; null: none so far
    std::unique_ptr<Doubts> doubts;  // about what is in the pool; null: no round goes on
  };
  struct Rank {
    std::uint32_t worker = 0;
    std::uint32_t dp_rank = 0;
    std::vector<HolderId> holders;
    bool uniform = true;  // every group needs all of a prefix, in blocks as they are hashed
  };
  struct Worker {
    std::shared_ptr<const std::string> name;
    std::vector<std::uint32_t> ranks;
  };

  // Callers enter in turn: the bare shared lock lets readers starve a writer. Throws NotAtOnce.
  std::shared_lock<std::shared_mutex> read(Patience patience = Patience::kFull) const;
  std::unique_lock<std::shared_mutex> write();

  std::uint32_t worker_of(std::string_view name);
  std::optional<std::uint32_t> rank_of(std::uint32_t worker, std::uint32_t dp_rank);
  std::vector<HolderId> holders_of(std::string_view worker) const;
  std::optional<HolderId> known_holder(std::uint32_t worker, std::uint32_t dp_rank,
                                       std::uint32_t group) const;
  std::optional<HolderId> holder_of(std::uint32_t worker, std::uint32_t dp_rank, std::uint32_t group);
  // Whether it took what the holder has on the device away.
  bool learn_group(HolderId holder, const Event& event);
  void learn_uniform(std::uint32_t rank);

  void store(HolderId holder, const EventBatch& batch, const Event& event, Applied& applied);
  void remove(HolderId holder, const EventBatch& batch, const Event& event, Applied& applied);
  // While the batch's hash number `at` is looked at, has what a later one will look at loaded.
  void load_ahead(const EventBatch& batch, std::size_t at) const;
  void enter(HolderId holder, Tier tier, std::uint64_t hash);
  void leave(HolderId holder, Tier tier, std::uint64_t hash);
  // Whether they held any: that takes a walk over all sets.
  bool drop(std::span<const HolderId> holders, Tiers tiers);
  std::vector<HolderId> holders_of(std::span<const std::uint32_t> ranks) const;
  [[noreturn]] void refuse(std::uint32_t worker, const Applied& applied);
  void sweep(std::size_t segments);
  void let_go(GroupHolder& holder, Tiers tiers);
  bool make_room(std::uint64_t hash, Applied& applied);
  void forget(std::uint64_t hash, SetId set, Applied& applied);
  std::size_t nbytes() const;
  void account();

  // Adds the rows of the ranks that are uniform, or hybrid. wanted: by worker; null: all.
  void match_uniform(Walk& walk, const std::vector<bool>* wanted, Matches& matches) const;
  void match_hybrid(Walk& walk, const std::vector<bool>* wanted, Matches& matches) const;
  void find_held(const GroupHolder& holder, HolderId id, Walk& walk, std::uint64_t bound,
                 std::array<Spans, kColumnCount>& held) const;
  // table_reach.cpp
  void add_loadable(Walk& walk, const PoolOf& pool_of, Matches& matches) const;
  std::uint64_t reach(const Rank& pool, std::uint64_t local, Walk& walk) const;
  Spans held_in_pool(HolderId id, std::uint64_t local, std::uint64_t bound, Walk& walk) const;

  const std::size_t max_blocks_;
  const bool reuse_reports_;
  const std::uint32_t block_tokens_;

  mutable std::mutex turn_;
  mutable std::shared_mutex lock_;  // guards everything below

  std::map<std::string, std::uint32_t, std::less<>> worker_by_name_;
  std::vector<Worker> workers_;
  std::vector<Rank> ranks_;
  std::vector<GroupHolder> holders_;
  std::vector<std::uint32_t> free_workers_, free_ranks_, free_holders_;

  FlatMap blocks_;  // block hash -> set of holders
  HolderSets sets_;
  std::size_t hybrid_ranks_ = 0;  // how many are not uniform
  std::size_t held_ = 0;          // blocks with a holder; the others wait to be swept
  std::uint64_t sweep_cursor_ = 0;
  std::size_t holders_nbytes_ = 0;  // of all more_copies and doubts
  BudgetShare share_;
  Applied total_;
  std::uint64_t batches_ = 0;
};

}  // namespace kvpool
