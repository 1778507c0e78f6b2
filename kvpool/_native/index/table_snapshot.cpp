// A table to its image, and back. See table_image.h.
#include <bit>

#include "index/digests.h"
#include "index/table.h"

namespace kvpool {

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

}  // namespace kvpool
