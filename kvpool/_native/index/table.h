// The prefix index: which worker holds which block, by the engine's own 64-bit block hash, and how many
// leading blocks of a prompt each has.
//
// Parents and tokens of blocks do not matter, so holes, refills and events without tokens are all the same.
//
// Copies (docs/decisions/0024-never-credit-above-the-engine.md): on the device tier a stored event adds one physical
// copy of each block and a removed event takes one away. A stored event from a prompt's root adds no copy of a held
// block: it may be a report of reused blocks. So no count exceeds the engine's. Other tiers have a block or not.
//
// A rank with one kind of group, which needs the whole prefix, is scored along the prompt. A rank with other
// groups (sliding windows, states, larger blocks) is scored by the lengths that all groups share (spans.h).
// Of such a group, a stored event from a root is credited only as far as a report would be true.
//
// Mark and sweep against a listing of the pool (docs/decisions/0029-mark-and-sweep-the-pool.md): mark() marks every
// credited block, apply() the listed blocks as stored events, sweep() removes the marked ones. Stored events unmark.
//
// A full table (max_blocks, or its MemoryBudget) evicts cold blocks, neither stored nor requested for a while
// (docs/decisions/0025-split-segments-evict-by-clock.md). Counts are then below the engine's, never above.
//
// Any thread. One lock: match(), workers() and stats() share it, all others hold it alone.
#pragma once

#include <array>
#include <atomic>
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
#include "index/spans.h"
#include "index/table_image.h"

namespace kvpool {

// Memory of several tables together, and of each. Any thread.
struct MemoryBudget {
  explicit MemoryBudget(std::size_t limit) : limit_nbytes(limit) {}

  const std::size_t limit_nbytes;
  std::atomic<std::size_t> used_nbytes{0};
};

// One table's part. Its owner has a lock.
class BudgetShare {
 public:
  // Every table may have this much, so that a late table works beside full ones.
  static constexpr std::size_t kFloorNbytes = std::size_t{1} << 20;

  explicit BudgetShare(std::shared_ptr<MemoryBudget> budget) : budget_(std::move(budget)) {}
  ~BudgetShare() { set(0); }
  BudgetShare(const BudgetShare&) = delete;
  BudgetShare& operator=(const BudgetShare&) = delete;

  void set(std::size_t nbytes) {
    if (budget_) budget_->used_nbytes += nbytes - nbytes_;  // modulo 2**64
    nbytes_ = nbytes;
  }
  bool may_grow() const {
    return !budget_ || nbytes_ < kFloorNbytes || budget_->used_nbytes < budget_->limit_nbytes;
  }

 private:
  std::shared_ptr<MemoryBudget> budget_;
  std::size_t nbytes_ = 0;
};

// Changes of block hashes, or events where it says so.
struct Applied {
  std::uint64_t stored = 0;    // new at this holder
  std::uint64_t copied = 0;    // another physical copy at this holder
  std::uint64_t repeated = 0;  // unchanged: stored before
  std::uint64_t removed = 0;   // gone from this holder
  std::uint64_t uncopied = 0;  // one physical copy fewer, others are left
  std::uint64_t unknown = 0;   // removed, but not held by this holder
  std::uint64_t refused = 0;   // stored, but without room
  std::uint64_t doubted = 0;   // stored, but perhaps a report of a block that is gone: not credited
  std::uint64_t cleared_events = 0;
  std::uint64_t skipped_events = 0;    // of an unknown type or medium
  std::uint64_t evicted = 0;           // cold blocks, of any worker, that made room
  std::uint64_t lookahead_events = 0;  // with hashes that no prompt has (EventBatch)
};

inline constexpr std::array kAppliedFields = {
    &Applied::stored,         &Applied::copied,         &Applied::repeated, &Applied::removed,
    &Applied::uncopied,       &Applied::unknown,        &Applied::refused,  &Applied::doubted,
    &Applied::cleared_events, &Applied::skipped_events, &Applied::evicted,  &Applied::lookahead_events};

// Leading blocks of a prompt: each tier alone, then unions of tiers, in which each block may be in another tier.
enum class Column : std::uint8_t { kDevice, kHost, kDisk, kPool, kLocal, kAny, kMemory };
inline constexpr std::size_t kColumnCount = 7;

struct Matches {
  std::vector<std::shared_ptr<const std::string>> workers;  // by row
  std::vector<std::uint32_t> dp_ranks;
  std::array<std::vector<std::uint32_t>, kColumnCount> columns;
  // A worker's local blocks (kLocal) and, from there on, its part of the pool, or of its near pool. Only where
  // match() had such pools.
  std::vector<std::uint32_t> loadable, near;
};

// Holder of a worker's part of the pool, a name that must live as long as the call; empty: none.
using PoolOf = std::function<std::string_view(std::string_view worker)>;

using TierBlocks = std::array<std::uint64_t, kTierCount>;

struct TableStats {
  Applied applied;  // by all batches
  std::uint64_t batches = 0;
  std::uint64_t blocks = 0;       // with a holder
  std::uint64_t holder_sets = 0;  // distinct sets in use
  std::uint64_t workers = 0;
  std::uint64_t holders = 0;  // (worker, rank, group)s
  std::uint64_t copies = 0;   // blocks at a holder with more than one physical copy
  std::uint64_t unswept = 0;  // places of blocks without a holder
  std::uint64_t nbytes = 0;
  TierBlocks tier_blocks{};  // per holder: a block counts once for each
};

// One worker's blocks, comparable between tables, in whatever order they were stored.
struct Content {
  std::uint64_t digest = 0;  // of every block, its rank, group, tier and copies; 0: nothing
  std::uint64_t blocks = 0;  // once per rank, group and tier
};

class Table {
 public:
  static constexpr std::size_t kMaxBlocks = std::size_t{1} << 32;
  static constexpr std::size_t kMaxWorkerNbytes = 256;

  // Blocks beyond max_blocks evict others. Without reuse_reports, events from a root count like all others:
  // exact as long as no engine reports reused blocks. block_tokens: of a hashed block; 0: unknown, and groups
  // have blocks of that size. budget: of all tables that share it; null: no limit.
  Table(std::size_t max_blocks, bool reuse_reports, std::uint32_t block_tokens = 0,
        std::shared_ptr<MemoryBudget> budget = nullptr);
  // From an image. Blocks without room are refused, and count as evicted(). Throws DamagedImage.
  Table(std::size_t max_blocks, bool reuse_reports, std::uint32_t block_tokens,
        std::shared_ptr<MemoryBudget> budget, const TableImage& image);
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  // All of the batch, in order; a match() sees all of it or nothing. default_rank: where the batch names
  // none. pool, near: holders, as their rank 0, of the batch's pool blocks and of those of a near pool, which is
  // a pool to its holder; none: the worker itself. Throws
  // ClearedTooOften for more than kMaxDrops clears of held blocks: then the worker's blocks are dropped.
  Applied apply(std::string_view worker, std::uint32_t default_rank, const EventBatch& batch,
                std::optional<std::string_view> pool = std::nullopt,
                std::optional<std::string_view> near = std::nullopt);

  // Rows: the ranks (of `workers` only, if given) that hold the first block in some tier, unordered. Throws
  // std::invalid_argument for circular hashes, TooMuchWork above its limit, NotAtOnce above that of kAtOnce.
  Matches match(std::span<const std::byte> hashes, const std::vector<std::string_view>* workers,
                const PoolOf& pool_of = nullptr, Patience patience = Patience::kFull,
                const PoolOf& near_of = nullptr) const;

  // Whether the worker holds each of these hashes in the pool. Throws NotAtOnce if a batch is being applied.
  std::vector<bool> pooled(std::string_view worker, std::span<const std::byte> hashes,
                           Patience patience = Patience::kFull) const;

  // False: unknown.
  bool remove_worker(std::string_view worker);
  bool clear(std::string_view worker, std::optional<std::uint32_t> dp_rank, Tiers tiers);

  // Marks the worker's pool blocks in one segment of the table: begin with cursor 0; returns the next cursor,
  // 0 after the last. Marks of an earlier round end when a round begins.
  std::uint64_t mark(std::string_view worker, std::uint64_t cursor);
  // Removes some marked blocks of the worker's part of the pool: (held ones, marks left).
  std::pair<std::size_t, std::size_t> sweep(std::string_view worker);

  // Holdings of this worker that were evicted since its last clear; 0: none, or unknown.
  std::uint64_t evicted(std::string_view worker) const;

  std::vector<std::string> workers() const;
  TierBlocks held_by(std::string_view worker) const;  // by all its ranks and groups; unknown: zeros
  // Nothing: unknown.
  std::optional<Content> content(std::string_view worker) const;
  TableStats stats() const;
  // Everything but the totals of batches. Readers go on meanwhile: about 10 ms for a million blocks.
  TableImage image() const;

 private:
  static constexpr std::size_t kMaxRanks = 1024;  // of a worker
  static constexpr std::size_t kMaxGroups = 256;  // of a rank
  static constexpr std::size_t kMaxWorkers = 65536;
  // Prefetched cache lines, enough to hide a miss of the last cache.
  static constexpr std::size_t kAhead = 16;
  // Of one batch, each a walk over all sets: 5 ms for a million. An engine clears once in a batch, and its
  // groups keep their kinds; alternating stores and clears would block all others.
  static constexpr unsigned kMaxDrops = 16;
  // One segment is swept per so many hashes of a batch, and one more per batch.
  static constexpr std::size_t kHashesPerSweep = 1024;

  struct Marks {
    FlatMap blocks{random_seed()};
    std::uint64_t cursor = 0;  // of sweep()
  };
  // One KV-cache group of one rank: its needs and sums.
  struct GroupHolder {
    std::uint32_t rank = 0;
    std::uint32_t group = 0;
    bool in_use = false;
    bool uniform = true;       // as its rank
    bool partial = false;      // engines may report absent blocks of it
    std::uint32_t last = 0;    // needed blocks at the end of a prefix; 0: all
    std::uint32_t stride = 1;  // hashed blocks in a block of the group
    std::uint64_t evicted = 0;
    TierBlocks blocks{};
    TierBlocks digests{};  // sums over blocks and copies: a change costs one addition
    // On the device, beyond the first: number by block; null: none so far.
    std::unique_ptr<FlatMap> more_copies;
    std::unique_ptr<Marks> marks;  // of its pool blocks; null: no round is under way
  };
  struct Rank {
    std::uint32_t worker = 0;
    std::uint32_t dp_rank = 0;
    std::vector<HolderId> holders;
    bool uniform = true;  // every group needs the whole prefix, in hashed blocks
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
  // Whether it dropped the holder's device blocks.
  bool learn_group(HolderId holder, const Event& event);
  void learn_uniform(std::uint32_t rank);

  void store(HolderId holder, const EventBatch& batch, const Event& event, Applied& applied);
  void remove(HolderId holder, const EventBatch& batch, const Event& event, Applied& applied);
  // At the batch's hash `at`, prefetches for a later one.
  void load_ahead(const EventBatch& batch, std::size_t at) const;
  // The number of a block's copies beyond the first, `more` if it is new, and whether it is. Null: no room, so
  // less is credited than could be.
  std::pair<std::uint32_t*, bool> add_copies(HolderId holder, std::uint64_t hash, std::uint32_t more);
  void enter(HolderId holder, Tier tier, std::uint64_t hash);
  void leave(HolderId holder, Tier tier, std::uint64_t hash);
  // Whether any were held: then it walked over all sets.
  bool drop(std::span<const HolderId> holders, Tiers tiers);
  std::vector<HolderId> holders_of(std::span<const std::uint32_t> ranks) const;
  [[noreturn]] void refuse(std::uint32_t worker, const Applied& applied);
  void free_places(std::size_t segments);
  void let_go(GroupHolder& holder, Tiers tiers);
  bool make_room(std::uint64_t hash, Applied& applied);
  void forget(std::uint64_t hash, SetId set, Applied& applied);
  std::size_t nbytes() const;
  void account();
  void add_to_total(const Applied& applied);

  // Adds the rows of uniform, or hybrid, ranks. wanted: by worker; null: all.
  void match_uniform(Walk& walk, const std::vector<bool>* wanted, Matches& matches) const;
  void match_hybrid(Walk& walk, const std::vector<bool>* wanted, Matches& matches) const;
  template <typename Visit>
  void walk_holder(HolderId id, std::size_t run, std::uint64_t bound, Walk& walk, Visit visit) const;
  void find_held(HolderId id, Walk& walk, std::uint64_t bound, std::array<Spans, kColumnCount>& held) const;
  std::vector<std::uint32_t> loadable(Walk& walk, const PoolOf& pool_of, const Matches& matches) const;
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
  std::size_t hybrid_ranks_ = 0;  // those not uniform
  std::size_t held_ = 0;          // blocks with a holder; the others wait for the sweep
  std::uint64_t sweep_cursor_ = 0;
  std::size_t holders_nbytes_ = 0;  // of all more_copies and marks
  BudgetShare share_;
  Applied total_;
  std::uint64_t batches_ = 0;
};

}  // namespace kvpool
