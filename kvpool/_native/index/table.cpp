#include "index/table.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <stdexcept>
#include <thread>

namespace kvpool {
namespace {

// How long an event loop waits for a batch: a short batch ends by then, and a hop to a thread takes as long.
constexpr std::chrono::microseconds kAtOnce{100};

}  // namespace

Table::Table(std::size_t max_blocks, bool reuse_reports, std::uint32_t block_tokens,
             std::shared_ptr<MemoryBudget> budget)
    : max_blocks_(max_blocks),
      reuse_reports_(reuse_reports),
      block_tokens_(block_tokens),
      blocks_(random_seed()),
      sets_(random_seed()),
      share_(std::move(budget)) {
  if (max_blocks < 1 || max_blocks > kMaxBlocks) {
    throw std::invalid_argument("max_blocks must be from 1 to 4294967296");
  }
}

std::shared_lock<std::shared_mutex> Table::read(Patience patience) const {
  if (patience == Patience::kFull) {
    const std::lock_guard turn(turn_);
    return std::shared_lock(lock_);
  }
  std::optional<std::chrono::steady_clock::time_point> until;
  for (;;) {
    if (const std::unique_lock turn(turn_, std::try_to_lock); turn) {
      std::shared_lock held(lock_, std::try_to_lock);
      if (held) return held;
    }
    const auto now = std::chrono::steady_clock::now();
    if (!until) until = now + kAtOnce;
    if (now >= *until) throw NotAtOnce();
    std::this_thread::yield();
  }
}

std::unique_lock<std::shared_mutex> Table::write() {
  const std::lock_guard turn(turn_);
  return std::unique_lock(lock_);
}

Applied Table::apply(std::string_view worker, std::uint32_t default_rank, const EventBatch& batch,
                     std::optional<std::string_view> pool, std::optional<std::string_view> near) {
  const auto held = write();
  Applied applied;
  applied.skipped_events = batch.skipped_events;
  applied.lookahead_events = batch.lookahead_events;
  const std::uint32_t publisher = worker_of(worker);
  const std::uint32_t its_rank = batch.dp_rank.value_or(default_rank);
  unsigned drops = 0;
  Tiers empty = 0;  // of its rank: cleared, and nothing was stored since
  // Events are short, so prefetching goes on across them.
  for (std::size_t i = 0; i < std::min(batch.hashes.size(), kAhead); ++i) blocks_.prefetch(batch.hashes[i]);
  for (Event event : batch.events) {
    if (drops > kMaxDrops) refuse(publisher, applied);
    if (event.kind == Event::Kind::kCleared) {
      ++applied.cleared_events;
      // vLLM clears the engine's own memory; the pool outlives it.
      const Tiers gone = event.device_only ? tiers_of(Tier::kDevice) : kLocalTiers;
      if ((gone & ~empty) == 0) continue;
      empty |= gone;
      if (const auto rank = rank_of(publisher, its_rank)) drops += drop(ranks_[*rank].holders, gone);
      continue;
    }
    const std::optional<std::string_view> shared = event.near                  ? near
                                                   : event.tier == Tier::kPool ? pool
                                                                               : std::nullopt;
    const bool elsewhere = shared.has_value();
    if (elsewhere) event.tier = Tier::kPool;
    const std::uint32_t by = elsewhere ? worker_of(*shared) : publisher;
    const std::uint32_t dp_rank = elsewhere ? 0 : its_rank;
    if (event.kind == Event::Kind::kRemoved) {
      // A removal does not name its group's kind, so it must not create the group.
      const auto holder = known_holder(by, dp_rank, event.group);
      if (holder) {
        remove(*holder, batch, event, applied);
      } else {
        applied.unknown += event.count;
      }
    } else if (const auto holder = holder_of(by, dp_rank, event.group)) {
      // A worker's own pool blocks may be larger than its memory's: they do not set the group's kind.
      if (elsewhere || event.tier != Tier::kPool) drops += learn_group(*holder, event);
      empty &= static_cast<Tiers>(~tiers_of(event.tier));
      store(*holder, batch, event, applied);
    } else {
      applied.refused += event.count;
    }
  }
  if (drops > kMaxDrops) refuse(publisher, applied);
  free_places(1 + batch.hashes.size() / kHashesPerSweep);
  account();
  add_to_total(applied);
  ++batches_;
  return applied;
}

// Former blocks are gone already, and the batch's applied part must not stay.
void Table::refuse(std::uint32_t worker, const Applied& applied) {
  drop(holders_of(workers_[worker].ranks), kAllTiers);
  account();
  add_to_total(applied);
  throw ClearedTooOften("it stores and clears in turns, more than " + std::to_string(kMaxDrops) + " times");
}

void Table::store(HolderId holder, const EventBatch& batch, const Event& event, Applied& applied) {
  std::size_t begin = event.begin;
  const std::size_t end = event.begin + event.count;
  Marks* const marks = event.tier == Tier::kPool ? holders_[holder].marks.get() : nullptr;
  const bool may_report = event.tier == Tier::kDevice && reuse_reports_ && event.root;
  const bool counts_copies = event.tier == Tier::kDevice && !may_report;
  if (may_report && (holders_[holder].partial || holders_[holder].stride != 1)) {
    // A report lists every block from the root on, but only the last ones are surely present. Of larger
    // blocks not even the last is: it may be partial.
    const std::size_t sure = holders_[holder].stride == 1 ? holders_[holder].last : 0;
    const std::size_t believed = std::min(event.count, sure);
    applied.doubted += event.count - believed;
    begin = end - believed;
  }
  for (std::size_t i = begin; i < end; ++i) {
    const std::uint64_t hash = batch.hashes[i];
    load_ahead(batch, i);
    if (marks != nullptr) marks->blocks.erase(hash);
    if (i % kHashesPerSweep == 0) account();
    const bool may_grow = share_.may_grow();
    const bool full = held_ >= max_blocks_;
    std::uint32_t* set = full ? blocks_.touch(hash) : blocks_.insert(hash, kNobody, may_grow).first;
    // A place that waits for the sweep is no block yet: it counts as new.
    if (set == nullptr || (full && sets_[*set].empty())) {
      set = make_room(hash, applied) ? blocks_.insert(hash, kNobody, may_grow).first : nullptr;
    }
    if (set == nullptr) {
      ++applied.refused;
      continue;
    }
    const std::size_t sets_nbytes = may_grow ? 0 : sets_.nbytes();
    const SetId to = sets_.with(*set, holder, event.tier);
    if (to == *set) {
      if (!counts_copies) {
        ++applied.repeated;
        continue;
      }
      if (std::uint32_t* const copies = add_copies(holder, hash, 0).first;
          copies != nullptr && *copies != ~std::uint32_t{0}) {
        ++*copies;
        holders_[holder].digests[static_cast<std::size_t>(Tier::kDevice)] += digest_of_copy(hash);
      }
      ++applied.copied;
      continue;
    }
    if (sets_[*set].empty()) ++held_;
    sets_.move(*set, to);
    *set = to;
    enter(holder, event.tier, hash);
    ++applied.stored;
    // A new set of holders needs memory, too: one more block is evicted for it.
    if (!may_grow && sets_.nbytes() > sets_nbytes) make_room(hash, applied);
  }
}

void Table::remove(HolderId holder, const EventBatch& batch, const Event& event, Applied& applied) {
  FlatMap* const more = event.tier == Tier::kDevice ? holders_[holder].more_copies.get() : nullptr;
  for (std::size_t i = event.begin; i < event.begin + event.count; ++i) {
    const std::uint64_t hash = batch.hashes[i];
    load_ahead(batch, i);
    std::uint32_t* set = blocks_.find(hash);
    const SetId to = set == nullptr ? kNobody : sets_.without(*set, holder, event.tier);
    if (set == nullptr || to == *set) {
      ++applied.unknown;
      continue;
    }
    if (more != nullptr && more->size() != 0) {
      if (std::uint32_t* copies = more->find(hash)) {
        holders_[holder].digests[static_cast<std::size_t>(Tier::kDevice)] -= digest_of_copy(hash);
        if (--*copies == 0) more->erase(hash);
        ++applied.uncopied;
        continue;
      }
    }
    sets_.move(*set, to);
    *set = to;
    if (to == kNobody) {
      blocks_.erase(hash);
      --held_;
    }
    leave(holder, event.tier, hash);
    ++applied.removed;
  }
}

std::pair<std::uint32_t*, bool> Table::add_copies(HolderId holder, std::uint64_t hash, std::uint32_t more) {
  std::unique_ptr<FlatMap>& copies = holders_[holder].more_copies;
  if (!copies) {
    copies = std::make_unique<FlatMap>(random_seed());
    holders_nbytes_ += copies->nbytes();
  }
  const std::size_t nbytes_before = copies->nbytes();
  const auto added = copies->insert(hash, more, share_.may_grow());
  holders_nbytes_ += copies->nbytes() - nbytes_before;
  return added;
}

void Table::load_ahead(const EventBatch& batch, std::size_t at) const {
  if (at + kAhead < batch.hashes.size()) blocks_.prefetch(batch.hashes[at + kAhead]);
}

void Table::enter(HolderId holder, Tier tier, std::uint64_t hash) {
  ++holders_[holder].blocks[static_cast<std::size_t>(tier)];
  holders_[holder].digests[static_cast<std::size_t>(tier)] += digest_of(hash);
}

void Table::leave(HolderId holder, Tier tier, std::uint64_t hash) {
  --holders_[holder].blocks[static_cast<std::size_t>(tier)];
  holders_[holder].digests[static_cast<std::size_t>(tier)] -= digest_of(hash);
}

// Frees the places of blocks without holders, a few at a time.
void Table::free_places(std::size_t segments) {
  for (std::size_t i = 0; i < segments && blocks_.size() > held_; ++i) {
    blocks_.visit_segment(sweep_cursor_, [this](std::uint64_t hash, SetId set) {
      if (!sets_[set].empty()) return;
      sets_.move(set, kNobody);
      blocks_.erase(hash);
    });
  }
}

// Frees a place for the block `hash`: an unused one, or a cold block's. False: none.
bool Table::make_room(std::uint64_t hash, Applied& applied) {
  do {
    const bool evicted = blocks_.evict(
        hash, [this](SetId set) { return sets_[set].empty(); },
        [&](std::uint64_t cold, SetId set) { forget(cold, set, applied); });
    if (!evicted) return false;
  } while (held_ >= max_blocks_);
  return true;
}

// Forgets a block with its copies: a surviving copy count would exceed the engine's.
void Table::forget(std::uint64_t hash, SetId set, Applied& applied) {
  for (const Holding holding : sets_[set]) {
    GroupHolder& holder = holders_[holding.holder()];
    const std::uint32_t* copies = holder.more_copies ? holder.more_copies->find(hash) : nullptr;
    if (copies != nullptr) {
      holder.digests[static_cast<std::size_t>(Tier::kDevice)] -= *copies * digest_of_copy(hash);
      holder.more_copies->erase(hash);
    }
    for (unsigned tiers = holding.tiers(); tiers != 0; tiers &= tiers - 1) {
      leave(holding.holder(), static_cast<Tier>(std::countr_zero(tiers)), hash);
    }
    ++holder.evicted;
  }
  if (!sets_[set].empty()) {
    --held_;
    ++applied.evicted;
  }
  sets_.move(set, kNobody);
}

std::uint64_t Table::mark(std::string_view worker, std::uint64_t cursor) {
  const auto held = write();
  const std::vector<HolderId> holders = holders_of(worker);
  if (holders.empty()) return 0;
  if (cursor == 0) {
    for (const HolderId holder : holders) {
      let_go(holders_[holder], tiers_of(Tier::kPool));
      holders_[holder].marks = std::make_unique<Marks>();
      holders_nbytes_ += holders_[holder].marks->blocks.nbytes();
    }
  }
  blocks_.visit_segment(cursor, [&](std::uint64_t hash, SetId set) {
    for (const HolderId holder : holders) {
      // A holder without marks joined, or was cleared, since the round began: its blocks are newer.
      if (!holders_[holder].marks || (sets_.tiers(set, holder) & tiers_of(Tier::kPool)) == 0) continue;
      // Even above the memory limit: an unmarked block would be credited for good.
      FlatMap& marked = holders_[holder].marks->blocks;
      const std::size_t nbytes_before = marked.nbytes();
      marked.insert(hash, 0);
      holders_nbytes_ += marked.nbytes() - nbytes_before;
    }
  });
  account();
  return cursor;
}

std::pair<std::size_t, std::size_t> Table::sweep(std::string_view worker) {
  const auto held = write();
  Applied applied;
  std::size_t left = 0;
  EventBatch marked;
  for (const HolderId holder : holders_of(worker)) {
    Marks* const marks = holders_[holder].marks.get();
    if (marks == nullptr) continue;
    marked.hashes.clear();
    marks->blocks.visit_segment(marks->cursor,
                                [&](std::uint64_t hash, std::uint32_t) { marked.hashes.push_back(hash); });
    const std::size_t count = marked.hashes.size();
    remove(holder, marked, {Event::Kind::kRemoved, Tier::kPool, Reach::kUnsaid, false, 0, 0, count}, applied);
    for (const std::uint64_t hash : marked.hashes) marks->blocks.erase(hash);
    left += marks->blocks.size();
    if (marks->blocks.size() == 0) let_go(holders_[holder], tiers_of(Tier::kPool));
  }
  account();
  total_.removed += applied.removed;
  return {applied.removed, left};
}

std::size_t Table::nbytes() const {
  return sizeof *this - sizeof blocks_ - sizeof sets_ + blocks_.nbytes() + sets_.nbytes() + holders_nbytes_ +
         workers_.capacity() * sizeof(Worker) + ranks_.capacity() * sizeof(Rank) +
         holders_.capacity() * sizeof(GroupHolder);
}

void Table::account() { share_.set(nbytes()); }

}  // namespace kvpool
