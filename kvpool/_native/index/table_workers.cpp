// Workers, ranks and groups of a table: how they come, what they need, how they go. See table.h.
#include <algorithm>
#include <stdexcept>

#include "index/table.h"

namespace kvpool {
namespace {

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

}  // namespace

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

}  // namespace kvpool
