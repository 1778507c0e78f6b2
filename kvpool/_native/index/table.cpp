#include "index/table.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <random>
#include <stdexcept>

namespace kvpool {
namespace {

static_assert(std::endian::native == std::endian::little, "hashes arrive as packed little-endian integers");

// Cache lines on their way while one block is looked at: enough to hide a miss of the last cache.
constexpr std::size_t kAhead = 16;

// One segment is swept for so many hashes of a batch, and one more for the batch.
constexpr std::size_t kHashesPerSweep = 1024;

constexpr std::array<Tiers, kColumnCount> kColumnTiers = {
    tiers_of(Tier::kDevice), tiers_of(Tier::kHost), tiers_of(Tier::kDisk),
    tiers_of(Tier::kPool),   kLocalTiers,           kAllTiers,
};

// Bit c: a block that is in these tiers counts for column c.
using Columns = std::uint8_t;
constexpr std::array<Columns, kAllTiers + 1> kColumnsOf = [] {
  std::array<Columns, kAllTiers + 1> columns{};
  for (unsigned tiers = 0; tiers <= kAllTiers; ++tiers) {
    for (unsigned column = 0; column < kColumnCount; ++column) {
      if ((tiers & kColumnTiers[column]) != 0)
        columns[tiers] = static_cast<Columns>(columns[tiers] | 1U << column);
    }
  }
  return columns;
}();

using Counts = std::array<std::uint32_t, kColumnCount>;

// A seat while a prompt is walked along.
struct Runner {
  SeatId seat;
  Columns running;  // columns whose run has not ended
  std::uint32_t result;
};

struct Result {
  std::uint32_t rank;
  Counts blocks;
};

std::uint64_t load(std::span<const std::byte> hashes, std::size_t index) {
  std::uint64_t hash;
  std::memcpy(&hash, hashes.data() + index * sizeof hash, sizeof hash);
  return hash;
}

std::uint64_t random_seed() {
  std::random_device device;
  return std::uint64_t{device()} << 32 | device();
}

// The finalizer of splitmix64. Part of what a digest means: replicas compare them.
std::uint64_t mix(std::uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}
std::uint64_t digest_of(std::uint64_t hash) { return mix(hash + 0x9e3779b97f4a7c15ULL); }
std::uint64_t digest_of_copy(std::uint64_t hash) { return mix(hash + 0xd1b54a32d192ed03ULL); }

template <typename Thing>
std::uint32_t take_place(std::vector<Thing>& things, std::vector<std::uint32_t>& free) {
  if (!free.empty()) {
    const std::uint32_t place = free.back();
    free.pop_back();
    return place;
  }
  things.emplace_back();
  free.reserve(things.capacity());  // so that giving back never needs memory
  return static_cast<std::uint32_t>(things.size() - 1);
}

void add(const TierBlocks& blocks, TierBlocks& sum) {
  for (std::size_t tier = 0; tier < kTierCount; ++tier) sum[tier] += blocks[tier];
}

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

std::shared_lock<std::shared_mutex> Table::read() const {
  const std::lock_guard turn(turn_);
  return std::shared_lock(lock_);
}

std::unique_lock<std::shared_mutex> Table::write() {
  const std::lock_guard turn(turn_);
  return std::unique_lock(lock_);
}

Applied& Applied::operator+=(const Applied& other) {
  stored += other.stored;
  copied += other.copied;
  repeated += other.repeated;
  removed += other.removed;
  uncopied += other.uncopied;
  unknown += other.unknown;
  refused += other.refused;
  doubted += other.doubted;
  cleared_events += other.cleared_events;
  skipped_events += other.skipped_events;
  evicted += other.evicted;
  return *this;
}

// ---- who

std::uint32_t Table::worker_of(std::string_view name) {
  if (name.empty() || name.size() > kMaxWorkerNbytes) {
    throw std::invalid_argument("a worker's name has 1 to 256 bytes");
  }
  const auto known = worker_by_name_.find(name);
  if (known != worker_by_name_.end()) return known->second;
  if (worker_by_name_.size() >= kMaxWorkers) throw std::invalid_argument("there are 65536 workers already");
  auto text = std::make_shared<const std::string>(name);
  const std::uint32_t worker = take_place(workers_, free_workers_);
  workers_[worker].name = std::move(text);
  worker_by_name_.emplace(name, worker);
  return worker;
}

std::optional<std::uint32_t> Table::rank_of(std::uint32_t worker, std::uint32_t dp_rank) {
  for (const std::uint32_t rank : workers_[worker].ranks) {
    if (ranks_[rank].dp_rank == dp_rank) return rank;
  }
  if (workers_[worker].ranks.size() >= kMaxRanks) return std::nullopt;
  workers_[worker].ranks.reserve(workers_[worker].ranks.size() + 1);
  const std::uint32_t rank = take_place(ranks_, free_ranks_);
  ranks_[rank] = {worker, dp_rank, {}, true};
  workers_[worker].ranks.push_back(rank);
  return rank;
}

std::optional<SeatId> Table::known_seat(std::uint32_t worker, std::uint32_t dp_rank,
                                        std::uint32_t group) const {
  for (const std::uint32_t rank : workers_[worker].ranks) {
    if (ranks_[rank].dp_rank != dp_rank) continue;
    for (const SeatId seat : ranks_[rank].seats) {
      if (seats_[seat].group == group) return seat;
    }
  }
  return std::nullopt;
}

std::optional<SeatId> Table::seat_of(std::uint32_t worker, std::uint32_t dp_rank, std::uint32_t group) {
  if (const auto known = known_seat(worker, dp_rank, group)) return known;
  const std::optional<std::uint32_t> rank = rank_of(worker, dp_rank);
  if (!rank) return std::nullopt;
  if (ranks_[*rank].seats.size() >= kMaxGroups) return std::nullopt;
  if (seats_.size() >= kMaxSeats && free_seats_.empty()) return std::nullopt;
  ranks_[*rank].seats.reserve(ranks_[*rank].seats.size() + 1);
  const SeatId seat = take_place(seats_, free_seats_);
  seats_[seat] = Seat{};
  seats_[seat].rank = *rank;
  seats_[seat].group = group;
  seats_[seat].in_use = true;
  seats_[seat].plain = ranks_[*rank].plain;
  ranks_[*rank].seats.push_back(seat);
  return seat;
}

std::vector<SeatId> Table::seats_of(std::string_view worker) const {
  std::vector<SeatId> seats;
  const auto known = worker_by_name_.find(worker);
  if (known == worker_by_name_.end()) return seats;
  for (const std::uint32_t rank : workers_[known->second].ranks) {
    seats.insert(seats.end(), ranks_[rank].seats.begin(), ranks_[rank].seats.end());
  }
  return seats;
}

void Table::learn_group(SeatId id, const Event& event) {
  Seat& seat = seats_[id];
  const std::uint32_t stride = seat.stride;
  const std::uint32_t needed = seat.last;
  // The end of a prompt may be told in smaller pieces, so a group's blocks are as large as the largest.
  if (block_tokens_ != 0 && event.block_tokens % block_tokens_ == 0) {
    seat.stride = std::max(seat.stride, event.block_tokens / block_tokens_);
  }
  if (event.reach != Reach::kUnsaid) {
    const bool partial = event.reach != Reach::kWhole;
    std::uint32_t last = event.reach == Reach::kState ? 1 : 0;
    if (event.reach == Reach::kWindow) {
      // As vLLM's SlidingWindowManager: what the next token sees, but at least one block.
      last = seat.last;
      if (event.window_tokens != 0 && event.block_tokens != 0) {
        last = std::max(1U, (event.window_tokens - 1 + event.block_tokens - 1) / event.block_tokens);
      }
    }
    if (partial != seat.partial || last != seat.last) {
      seat.partial = partial;
      seat.last = last;
      // What was believed of it as long as it was taken for something else.
      std::vector<Tiers> gone(seats_.size());
      gone[id] = tiers_of(Tier::kDevice);
      drop(gone);
    }
  }
  if (seat.stride != stride || seat.last != needed) learn_plain(seat.rank);
}

void Table::learn_plain(std::uint32_t id) {
  Rank& rank = ranks_[id];
  const bool plain = std::ranges::all_of(
      rank.seats, [this](SeatId one) { return seats_[one].last == 0 && seats_[one].stride == 1; });
  if (plain == rank.plain) return;
  rank.plain = plain;
  uneven_ = plain ? uneven_ - 1 : uneven_ + 1;
  for (const SeatId one : rank.seats) seats_[one].plain = plain;
}

// ---- writing

Applied Table::apply(std::string_view worker, std::uint32_t default_rank, const EventBatch& batch,
                     std::optional<std::string_view> pool) {
  const auto held = write();
  Applied applied;
  applied.skipped_events = batch.skipped_events;
  const std::uint32_t publisher = worker_of(worker);
  const std::uint32_t its_rank = batch.dp_rank.value_or(default_rank);
  // Events are short, so the loading goes on from one to the next.
  for (std::size_t i = 0; i < std::min(batch.hashes.size(), kAhead); ++i) blocks_.prefetch(batch.hashes[i]);
  for (const Event& event : batch.events) {
    if (event.kind == Event::Kind::kCleared) {
      ++applied.cleared_events;
      // What vLLM clears is the engine's own memory; the pool outlives it.
      const Tiers gone = event.device_only ? tiers_of(Tier::kDevice) : kLocalTiers;
      if (const auto rank = rank_of(publisher, its_rank)) drop(std::span(&*rank, 1), gone);
      continue;
    }
    const bool elsewhere = pool && event.tier == Tier::kPool;
    const std::uint32_t by = elsewhere ? worker_of(*pool) : publisher;
    const std::uint32_t dp_rank = elsewhere ? 0 : its_rank;
    if (event.kind == Event::Kind::kRemoved) {
      // A removal does not say what its group needs, so it must not be what makes the group known.
      const auto seat = known_seat(by, dp_rank, event.group);
      if (seat) {
        remove(*seat, batch, event, applied);
      } else {
        applied.unknown += event.count;
      }
    } else if (const auto seat = seat_of(by, dp_rank, event.group)) {
      // In a worker's own name the pool's blocks, which may be larger, say nothing of what its memory holds.
      if (elsewhere || event.tier != Tier::kPool) learn_group(*seat, event);
      store(*seat, batch, event, applied);
    } else {
      applied.refused += event.count;
    }
  }
  sweep(1 + batch.hashes.size() / kHashesPerSweep);
  account();
  total_ += applied;
  ++batches_;
  return applied;
}

void Table::store(SeatId seat, const EventBatch& batch, const Event& event, Applied& applied) {
  std::size_t begin = event.begin;
  const std::size_t end = event.begin + event.count;
  Doubts* const doubts = event.tier == Tier::kPool ? seats_[seat].doubts.get() : nullptr;
  const bool may_report = event.tier == Tier::kDevice && reuse_reports_ && event.root;
  const bool counts_copies = event.tier == Tier::kDevice && !may_report;
  if (may_report && (seats_[seat].partial || seats_[seat].stride != 1)) {
    // A report names every block from the root on, though only those at the end are surely there; of larger blocks
    // not even the last one, which may be there in part.
    const std::size_t sure = seats_[seat].stride == 1 ? seats_[seat].last : 0;
    const std::size_t believed = std::min(event.count, sure);
    applied.doubted += event.count - believed;
    begin = end - believed;
  }
  for (std::size_t i = begin; i < end; ++i) {
    const std::uint64_t hash = batch.hashes[i];
    load_ahead(batch, i);
    if (doubts != nullptr) doubts->blocks.erase(hash);
    if (i % kHashesPerSweep == 0) account();
    const bool may_grow = share_.may_grow();
    const bool full = held_ >= max_blocks_;
    std::uint32_t* set = full ? blocks_.touch(hash) : blocks_.insert(hash, kNobody, may_grow).first;
    // A place that waits to be swept is no block yet: it is one more, too.
    if (set == nullptr || (full && sets_[*set].empty())) {
      set = make_room(hash, applied) ? blocks_.insert(hash, kNobody, may_grow).first : nullptr;
    }
    if (set == nullptr) {
      ++applied.refused;
      continue;
    }
    const std::size_t sets_nbytes = may_grow ? 0 : sets_.nbytes();
    const SetId to = sets_.with(*set, seat, event.tier);
    if (to == *set) {
      if (!counts_copies) {
        ++applied.repeated;
        continue;
      }
      std::unique_ptr<FlatMap>& more = seats_[seat].more_copies;
      if (!more) {
        more = std::make_unique<FlatMap>(random_seed());
        seats_nbytes_ += more->nbytes();
      }
      const std::size_t nbytes_before = more->nbytes();
      // Where there is no room for it the copy is not counted: less is credited than could be.
      const auto [copies, is_new] = more->insert(hash, 0, may_grow);
      seats_nbytes_ += more->nbytes() - nbytes_before;
      if (copies != nullptr && *copies != ~std::uint32_t{0}) {
        ++*copies;
        seats_[seat].digests[static_cast<std::size_t>(Tier::kDevice)] += digest_of_copy(hash);
      }
      ++applied.copied;
      continue;
    }
    if (sets_[*set].empty()) ++held_;
    sets_.move(*set, to);
    *set = to;
    enter(seat, event.tier, hash);
    ++applied.stored;
    // A set of its own is memory, too: another block goes for it.
    if (!may_grow && sets_.nbytes() > sets_nbytes) make_room(hash, applied);
  }
}

void Table::remove(SeatId seat, const EventBatch& batch, const Event& event, Applied& applied) {
  FlatMap* const more = event.tier == Tier::kDevice ? seats_[seat].more_copies.get() : nullptr;
  for (std::size_t i = event.begin; i < event.begin + event.count; ++i) {
    const std::uint64_t hash = batch.hashes[i];
    load_ahead(batch, i);
    std::uint32_t* set = blocks_.find(hash);
    const SetId to = set == nullptr ? kNobody : sets_.without(*set, seat, event.tier);
    if (set == nullptr || to == *set) {
      ++applied.unknown;
      continue;
    }
    if (more != nullptr && more->size() != 0) {
      if (std::uint32_t* copies = more->find(hash)) {
        seats_[seat].digests[static_cast<std::size_t>(Tier::kDevice)] -= digest_of_copy(hash);
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
    leave(seat, event.tier, hash);
    ++applied.removed;
  }
}

void Table::load_ahead(const EventBatch& batch, std::size_t at) const {
  if (at + kAhead < batch.hashes.size()) blocks_.prefetch(batch.hashes[at + kAhead]);
}

void Table::enter(SeatId seat, Tier tier, std::uint64_t hash) {
  ++seats_[seat].blocks[static_cast<std::size_t>(tier)];
  seats_[seat].digests[static_cast<std::size_t>(tier)] += digest_of(hash);
}

void Table::leave(SeatId seat, Tier tier, std::uint64_t hash) {
  --seats_[seat].blocks[static_cast<std::size_t>(tier)];
  seats_[seat].digests[static_cast<std::size_t>(tier)] -= digest_of(hash);
}

void Table::drop(std::span<const std::uint32_t> ranks, Tiers tiers) {
  std::vector<Tiers> gone(seats_.size());
  for (const std::uint32_t rank : ranks) {
    for (const SeatId seat : ranks_[rank].seats) gone[seat] = tiers;
  }
  drop(gone);
}

// `gone`: by seat.
void Table::drop(std::span<const Tiers> gone) {
  bool anything = false;
  for (SeatId seat = 0; seat < gone.size(); ++seat) {
    // What it held is gone altogether: what it will be told to hold is whole again.
    if ((gone[seat] & kLocalTiers) == kLocalTiers) seats_[seat].evicted = 0;
    for (unsigned tier = 0; tier < kTierCount; ++tier) {
      anything = anything || ((gone[seat] >> tier & 1U) != 0 && seats_[seat].blocks[tier] != 0);
    }
  }
  // Walking over all sets for nothing is what a publisher of empty clears would make us do.
  if (!anything) return;
  held_ -= sets_.drop(gone);
  for (SeatId seat = 0; seat < gone.size(); ++seat) {
    for (unsigned tier = 0; tier < kTierCount; ++tier) {
      if ((gone[seat] >> tier & 1U) != 0) seats_[seat].blocks[tier] = seats_[seat].digests[tier] = 0;
    }
    let_go(seats_[seat], gone[seat]);
  }
}

// What a seat keeps beside its blocks of these tiers.
void Table::let_go(Seat& seat, Tiers tiers) {
  if (seat.more_copies && (tiers & tiers_of(Tier::kDevice)) != 0) {
    seats_nbytes_ -= seat.more_copies->nbytes();
    seat.more_copies.reset();
  }
  if (seat.doubts && (tiers & tiers_of(Tier::kPool)) != 0) {
    seats_nbytes_ -= seat.doubts->blocks.nbytes();
    seat.doubts.reset();
  }
}

bool Table::clear(std::string_view worker, std::optional<std::uint32_t> dp_rank, Tiers tiers) {
  const auto held = write();
  const auto known = worker_by_name_.find(worker);
  if (known == worker_by_name_.end()) return false;
  std::vector<std::uint32_t> ranks;
  for (const std::uint32_t rank : workers_[known->second].ranks) {
    if (!dp_rank || ranks_[rank].dp_rank == *dp_rank) ranks.push_back(rank);
  }
  drop(ranks, tiers);
  account();
  return !ranks.empty();
}

bool Table::remove_worker(std::string_view worker) {
  const auto held = write();
  const auto known = worker_by_name_.find(worker);
  if (known == worker_by_name_.end()) return false;
  const std::uint32_t place = known->second;
  drop(workers_[place].ranks, kAllTiers);
  // From here on nothing needs memory. The numbers may be given to others: no set names them any more.
  for (const std::uint32_t rank : workers_[place].ranks) {
    for (const SeatId seat : ranks_[rank].seats) {
      let_go(seats_[seat], kAllTiers);
      seats_[seat] = Seat{};
      free_seats_.push_back(seat);
    }
    if (!ranks_[rank].plain) --uneven_;
    ranks_[rank] = Rank{};
    free_ranks_.push_back(rank);
  }
  workers_[place] = Worker{};
  free_workers_.push_back(place);
  worker_by_name_.erase(known);
  account();
  return true;
}

std::uint64_t Table::doubt(std::string_view worker, std::uint64_t cursor) {
  const auto held = write();
  const std::vector<SeatId> seats = seats_of(worker);
  if (seats.empty()) return 0;
  if (cursor == 0) {
    for (const SeatId seat : seats) {
      let_go(seats_[seat], tiers_of(Tier::kPool));
      seats_[seat].doubts = std::make_unique<Doubts>(random_seed());
      seats_nbytes_ += seats_[seat].doubts->blocks.nbytes();
    }
  }
  blocks_.visit_segment(cursor, [&](std::uint64_t hash, SetId set) {
    for (const SeatId seat : seats) {
      // A seat without doubts has come, or was cleared, since the round began: what it holds was told of since.
      if (!seats_[seat].doubts || (sets_.tiers(set, seat) & tiers_of(Tier::kPool)) == 0) continue;
      // Though there be no memory for it: what is not in doubt would be credited for good.
      FlatMap& doubted = seats_[seat].doubts->blocks;
      const std::size_t nbytes_before = doubted.nbytes();
      doubted.insert(hash, 0);
      seats_nbytes_ += doubted.nbytes() - nbytes_before;
    }
  });
  account();
  return cursor;
}

std::pair<std::size_t, std::size_t> Table::expel(std::string_view worker) {
  const auto held = write();
  Applied applied;
  std::size_t left = 0;
  EventBatch doubted;
  for (const SeatId seat : seats_of(worker)) {
    Doubts* const doubts = seats_[seat].doubts.get();
    if (doubts == nullptr) continue;
    doubted.hashes.clear();
    doubts->blocks.visit_segment(doubts->cursor,
                                 [&](std::uint64_t hash, std::uint32_t) { doubted.hashes.push_back(hash); });
    const std::size_t count = doubted.hashes.size();
    remove(seat, doubted, {Event::Kind::kRemoved, Tier::kPool, Reach::kUnsaid, false, 0, 0, count}, applied);
    for (const std::uint64_t hash : doubted.hashes) doubts->blocks.erase(hash);
    left += doubts->blocks.size();
    if (doubts->blocks.size() == 0) let_go(seats_[seat], tiers_of(Tier::kPool));
  }
  account();
  total_.removed += applied.removed;
  return {applied.removed, left};
}

// Takes the places of blocks that nobody holds any more, a few at a time.
void Table::sweep(std::size_t segments) {
  for (std::size_t i = 0; i < segments && blocks_.size() > held_; ++i) {
    blocks_.sweep_segment(sweep_cursor_, [this](SetId set) {
      if (!sets_[set].empty()) return false;
      sets_.move(set, kNobody);
      return true;
    });
  }
}

// ---- at rest

Table::Table(std::size_t max_blocks, bool reuse_reports, std::uint32_t block_tokens,
             std::shared_ptr<MemoryBudget> budget, const TableImage& image)
    : Table(max_blocks, reuse_reports, block_tokens, std::move(budget)) {
  // Nobody else knows this table yet: no lock. Seats are given out from 0 on, so a place in the image is a SeatId.
  for (std::size_t i = 0; i < image.seats.size(); ++i) {
    const TableImage::Seat& seat = image.seats[i];
    const auto place = seat_of(worker_of(seat.worker), seat.dp_rank, seat.group);
    if (place != static_cast<SeatId>(i))
      throw DamagedImage("a seat stands there twice, or there are too many");
    seats_[*place].partial = seat.partial;
    seats_[*place].last = seat.last;
    seats_[*place].stride = seat.stride;
    seats_[*place].evicted = seat.evicted;
    learn_plain(seats_[*place].rank);
  }
  std::vector<SetId> sets(image.set_ends.size());
  for (std::size_t i = 0; i < sets.size(); ++i) {
    sets[i] = sets_.of(image.set(i));
    sets_.move(kNobody,
               sets[i]);  // until all blocks are in: one that is refused must not be what frees a set
  }
  for (std::size_t i = 0; i < image.hashes.size(); ++i) {
    if (i % kHashesPerSweep == 0) account();
    if (i + kAhead < image.hashes.size()) blocks_.prefetch(image.hashes[i + kAhead]);
    const std::uint64_t hash = image.hashes[i];
    const SetId set = sets[image.set_of[i]];
    const auto [place, is_new] = blocks_.size() < max_blocks_ ? blocks_.insert(hash, set, share_.may_grow())
                                                              : std::pair(blocks_.find(hash), false);
    if (place == nullptr) {
      // What was cold there is not in the image, so one block is as good as another.
      ++total_.refused;
      for (const Holding holding : sets_[set]) ++seats_[holding.seat()].evicted;
      continue;
    }
    if (!is_new) throw DamagedImage("a block stands there twice");
    sets_.move(kNobody, set);
    ++held_;
    for (const Holding holding : sets_[set]) {
      for (unsigned tiers = holding.tiers(); tiers != 0; tiers &= tiers - 1) {
        enter(holding.seat(), static_cast<Tier>(std::countr_zero(tiers)), hash);
      }
    }
  }
  for (const SetId set : sets) sets_.move(set, kNobody);
  for (const TableImage::Copies& copies : image.copies) {
    const std::uint32_t* set = blocks_.find(copies.hash);
    if (set == nullptr) continue;  // refused
    if ((sets_.tiers(*set, copies.seat) & tiers_of(Tier::kDevice)) == 0) {
      throw DamagedImage("copies of a block that their holder does not have");
    }
    std::unique_ptr<FlatMap>& more = seats_[copies.seat].more_copies;
    if (!more) {
      more = std::make_unique<FlatMap>(random_seed());
      seats_nbytes_ += more->nbytes();
    }
    const std::size_t nbytes_before = more->nbytes();
    account();
    const auto [place, is_new] = more->insert(copies.hash, copies.more, share_.may_grow());
    seats_nbytes_ += more->nbytes() - nbytes_before;
    if (place == nullptr) continue;  // no room for it: less is credited than could be
    if (!is_new) throw DamagedImage("copies stand there twice");
    seats_[copies.seat].digests[static_cast<std::size_t>(Tier::kDevice)] +=
        copies.more * digest_of_copy(copies.hash);
  }
  account();
}

TableImage Table::image() const {
  constexpr std::uint32_t kNowhere = ~std::uint32_t{0};
  TableImage image;
  const auto held = read();
  std::vector<SeatId> places(seats_.size(), kNowhere);
  for (SeatId seat = 0; seat < seats_.size(); ++seat) {
    if (!seats_[seat].in_use) continue;
    const Rank& rank = ranks_[seats_[seat].rank];
    const auto place = static_cast<SeatId>(image.seats.size());
    places[seat] = place;
    image.seats.push_back({*workers_[rank.worker].name, rank.dp_rank, seats_[seat].group,
                           seats_[seat].partial, seats_[seat].last, seats_[seat].stride,
                           seats_[seat].evicted});
    if (!seats_[seat].more_copies) continue;
    seats_[seat].more_copies->for_each(
        [&](std::uint64_t hash, std::uint32_t more) { image.copies.push_back({place, more, hash}); });
  }
  image.hashes.reserve(held_);
  image.set_of.reserve(held_);
  std::vector<std::uint32_t> set_places(sets_.limit(), kNowhere);
  blocks_.for_each([&](std::uint64_t hash, SetId set) {
    const auto holdings = sets_[set];
    if (holdings.empty()) return;  // it waits to be swept
    if (set_places[set] == kNowhere) {
      set_places[set] = static_cast<std::uint32_t>(image.set_ends.size());
      for (const Holding holding : holdings)
        image.holdings.emplace_back(places[holding.seat()], holding.tiers());
      image.set_ends.push_back(image.holdings.size());
    }
    image.hashes.push_back(hash);
    image.set_of.push_back(set_places[set]);
  });
  return image;
}

// Where the block `hash` would stand: a place of nobody's, or of a cold block. False: there is none.
bool Table::make_room(std::uint64_t hash, Applied& applied) {
  do {
    const bool evicted = blocks_.evict(
        hash, [this](SetId set) { return sets_[set].empty(); },
        [&](std::uint64_t cold, SetId set) { forget(cold, set, applied); });
    if (!evicted) return false;
  } while (held_ >= max_blocks_);
  return true;
}

// All that is known of a block, its copies as well: a count that outlived it would be more than the engine has.
void Table::forget(std::uint64_t hash, SetId set, Applied& applied) {
  for (const Holding holding : sets_[set]) {
    Seat& seat = seats_[holding.seat()];
    const std::uint32_t* copies = seat.more_copies ? seat.more_copies->find(hash) : nullptr;
    if (copies != nullptr) {
      seat.digests[static_cast<std::size_t>(Tier::kDevice)] -= *copies * digest_of_copy(hash);
      seat.more_copies->erase(hash);
    }
    for (unsigned tiers = holding.tiers(); tiers != 0; tiers &= tiers - 1) {
      leave(holding.seat(), static_cast<Tier>(std::countr_zero(tiers)), hash);
    }
    ++seat.evicted;
  }
  if (!sets_[set].empty()) {
    --held_;
    ++applied.evicted;
  }
  sets_.move(set, kNobody);
}

std::size_t Table::nbytes() const {
  return sizeof *this - sizeof blocks_ - sizeof sets_ + blocks_.nbytes() + sets_.nbytes() + seats_nbytes_ +
         workers_.capacity() * sizeof(Worker) + ranks_.capacity() * sizeof(Rank) +
         seats_.capacity() * sizeof(Seat);
}

void Table::account() { share_.set(nbytes()); }

// ---- reading

Matches Table::match(std::span<const std::byte> hashes, const std::vector<std::string_view>* workers) const {
  const std::size_t count = hashes.size() / sizeof(std::uint64_t);
  Matches matches;
  if (count == 0) return matches;
  std::vector<Runner> runners;
  std::vector<Result> results;
  const auto held = read();

  std::vector<bool> wanted;
  if (workers != nullptr) {
    wanted.resize(workers_.size());
    for (const std::string_view name : *workers) {
      const auto known = worker_by_name_.find(name);
      if (known != worker_by_name_.end()) wanted[known->second] = true;
    }
  }

  std::array<FlatMap::Place, kAhead> places;
  for (std::size_t i = 0; i < std::min(count, kAhead); ++i) places[i] = blocks_.prefetch(load(hashes, i));
  const auto set_of = [&](std::size_t index) {
    FlatMap::Place& place = places[index % kAhead];
    const std::uint32_t* set = blocks_.touch(place, load(hashes, index));
    if (index + kAhead < count) place = blocks_.prefetch(load(hashes, index + kAhead));
    return set == nullptr ? kNobody : *set;
  };

  SetId last = set_of(0);
  for (const Holding holding : sets_[last]) {
    const Seat& seat = seats_[holding.seat()];
    if (!seat.plain || (workers != nullptr && !wanted[ranks_[seat.rank].worker])) continue;
    runners.push_back(
        {holding.seat(), kColumnsOf[holding.tiers()], static_cast<std::uint32_t>(results.size())});
    results.push_back({seat.rank, {}});
  }

  std::size_t reached = 1;
  for (; reached < count && !runners.empty(); ++reached) {
    const SetId set = set_of(reached);
    if (set == last) continue;
    last = set;
    // Both are sorted by seat: whoever still runs and is not in the set, or not in the right tiers, stops here.
    const auto holdings = sets_[set];
    auto holding = holdings.begin();
    std::size_t kept = 0;
    for (Runner runner : runners) {
      while (holding != holdings.end() && holding->seat() < runner.seat) ++holding;
      const bool there = holding != holdings.end() && holding->seat() == runner.seat;
      const unsigned running = runner.running & (there ? kColumnsOf[holding->tiers()] : 0U);
      for (unsigned ended = runner.running & ~running; ended != 0; ended &= ended - 1) {
        results[runner.result].blocks[static_cast<std::size_t>(std::countr_zero(ended))] =
            static_cast<std::uint32_t>(reached);
      }
      runner.running = static_cast<Columns>(running);
      if (running != 0) runners[kept++] = runner;
    }
    runners.resize(kept);
  }
  for (const Runner& runner : runners) {
    for (unsigned running = runner.running; running != 0; running &= running - 1) {
      results[runner.result].blocks[static_cast<std::size_t>(std::countr_zero(running))] =
          static_cast<std::uint32_t>(count);
    }
  }

  // A rank can use what all of its groups hold.
  const auto by_rank = [](const Result& a, const Result& b) { return a.rank < b.rank; };
  if (!std::ranges::is_sorted(results, by_rank)) std::ranges::sort(results, by_rank);
  for (std::size_t begin = 0, end = 0; begin < results.size(); begin = end) {
    const Rank& rank = ranks_[results[begin].rank];
    Counts blocks = results[begin].blocks;
    for (end = begin + 1; end < results.size() && results[end].rank == results[begin].rank; ++end) {
      for (std::size_t column = 0; column < kColumnCount; ++column) {
        blocks[column] = std::min(blocks[column], results[end].blocks[column]);
      }
    }
    const std::size_t any = static_cast<std::size_t>(Column::kAny);
    if (end - begin < rank.seats.size() || blocks[any] == 0) continue;
    matches.workers.push_back(workers_[rank.worker].name);
    matches.dp_ranks.push_back(rank.dp_rank);
    for (std::size_t column = 0; column < kColumnCount; ++column) {
      matches.columns[column].push_back(blocks[column]);
    }
  }
  if (uneven_ != 0) match_uneven(hashes, workers == nullptr ? nullptr : &wanted, matches);
  return matches;
}

void Table::match_uneven(std::span<const std::byte> hashes, const std::vector<bool>* wanted,
                         Matches& matches) const {
  const std::uint64_t count = hashes.size() / sizeof(std::uint64_t);
  std::map<std::uint32_t, SetRuns> runs;  // by stride
  std::array<Spans, kColumnCount> usable, held;
  for (const Rank& rank : ranks_) {
    if (rank.plain || (wanted != nullptr && !(*wanted)[rank.worker])) continue;
    usable.fill({{1, count}});
    std::uint64_t bound = count, unit = 1;
    // Those that need all of a prefix come first: nobody has to look behind the end of what they hold.
    for (const bool window : {false, true}) {
      for (const SeatId id : rank.seats) {
        const Seat& seat = seats_[id];
        if ((seat.last != 0) != window || bound == 0) continue;
        unit = std::lcm(unit, std::uint64_t{seat.stride});
        if (unit > count) unit = count + 1;  // no length is a multiple
        const auto walk = runs.try_emplace(seat.stride, blocks_, hashes, seat.stride).first;
        find_held(seat, id, walk->second, bound, held);
        bound = 0;
        for (std::size_t column = 0; column < kColumnCount; ++column) {
          keep_common(usable[column], held[column]);
          if (!usable[column].empty()) bound = std::max(bound, usable[column].back().last);
        }
      }
    }
    if (bound == 0 || longest(usable[static_cast<std::size_t>(Column::kAny)], unit) == 0) continue;
    matches.workers.push_back(workers_[rank.worker].name);
    matches.dp_ranks.push_back(rank.dp_rank);
    for (std::size_t column = 0; column < kColumnCount; ++column) {
      matches.columns[column].push_back(static_cast<std::uint32_t>(longest(usable[column], unit)));
    }
  }
}

// What a seat holds of a prompt, by column, of its first `bound` hashed blocks at least.
void Table::find_held(const Seat& seat, SeatId id, SetRuns& runs, std::uint64_t bound,
                      std::array<Spans, kColumnCount>& held) const {
  for (Spans& spans : held) spans.clear();
  std::array<std::uint64_t, kColumnCount> since{};
  Columns running = 0, from_root = kColumnsOf[kAllTiers];
  std::uint64_t begin = 0;
  const SetRuns::Run* run = nullptr;
  for (std::size_t i = 0;; ++i) {
    // Whoever needs all of a prefix is not asked behind its first hole.
    const bool on = begin * seat.stride < bound && (seat.last != 0 || from_root != 0);
    run = on ? runs.at(i) : nullptr;
    const Columns now = run == nullptr ? Columns{0} : kColumnsOf[sets_.tiers(run->set, id)];
    // Most changes of the set are somebody else's.
    for (std::size_t column = 0; column < kColumnCount && now != running; ++column) {
      const bool was = (running >> column & 1U) != 0, is = (now >> column & 1U) != 0;
      if (is && !was) since[column] = begin;
      if (was && !is) add_held(held[column], since[column], begin, seat.last, seat.stride);
    }
    running = now;
    from_root = static_cast<Columns>(from_root & now);
    if (run == nullptr) return;
    begin = run->end;
  }
}

std::uint64_t Table::evicted(std::string_view worker) const {
  const auto held = read();
  std::uint64_t evicted = 0;
  for (const SeatId seat : seats_of(worker)) evicted += seats_[seat].evicted;
  return evicted;
}

std::vector<std::string> Table::workers() const {
  const auto held = read();
  std::vector<std::string> names;
  names.reserve(worker_by_name_.size());
  for (const auto& [name, worker] : worker_by_name_) names.push_back(name);
  return names;
}

TierBlocks Table::held_by(std::string_view worker) const {
  const auto held = read();
  TierBlocks blocks{};
  const auto known = worker_by_name_.find(worker);
  if (known == worker_by_name_.end()) return blocks;
  for (const std::uint32_t rank : workers_[known->second].ranks) {
    for (const SeatId seat : ranks_[rank].seats) add(seats_[seat].blocks, blocks);
  }
  return blocks;
}

std::optional<Content> Table::content(std::string_view worker) const {
  const auto held = read();
  const auto known = worker_by_name_.find(worker);
  if (known == worker_by_name_.end()) return std::nullopt;
  Content content;
  for (const std::uint32_t rank : workers_[known->second].ranks) {
    for (const SeatId seat : ranks_[rank].seats) {
      for (unsigned tier = 0; tier < kTierCount; ++tier) {
        if (seats_[seat].blocks[tier] == 0) continue;
        const std::uint64_t where =
            (std::uint64_t{ranks_[rank].dp_rank} << 16 | seats_[seat].group) << 2 | tier;
        content.digest += mix(seats_[seat].digests[tier] ^ mix(where + 1));
        content.blocks += seats_[seat].blocks[tier];
      }
    }
  }
  return content;
}

TableStats Table::stats() const {
  const auto held = read();
  TableStats stats;
  stats.applied = total_;
  stats.batches = batches_;
  stats.blocks = held_;
  stats.holder_sets = sets_.size();
  stats.workers = worker_by_name_.size();
  stats.unswept = blocks_.size() - held_;
  stats.nbytes = nbytes();
  for (const Seat& seat : seats_) {
    if (seat.in_use) {
      ++stats.holders;
      add(seat.blocks, stats.tier_blocks);
    }
    if (seat.more_copies) stats.copies += seat.more_copies->size();
  }
  return stats;
}

}  // namespace kvpool
