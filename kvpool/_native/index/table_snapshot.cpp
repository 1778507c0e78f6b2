// A table to its image, and back. See table_image.h.
#include <bit>

#include "index/digests.h"
#include "index/table.h"

namespace kvpool {

Table::Table(std::size_t max_blocks, bool reuse_reports, std::uint32_t block_tokens,
             std::shared_ptr<MemoryBudget> budget, const TableImage& image)
    : Table(max_blocks, reuse_reports, block_tokens, std::move(budget)) {
  // No other thread has this table yet: no lock. Holders are numbered from 0, so an index in the image is a HolderId.
  for (std::size_t i = 0; i < image.holders.size(); ++i) {
    const TableImage::GroupHolder& holder = image.holders[i];
    const auto place = holder_of(worker_of(holder.worker), holder.dp_rank, holder.group);
    if (place != static_cast<HolderId>(i))
      throw DamagedImage("a holder stands there twice, or there are too many");
    holders_[*place].partial = holder.partial;
    holders_[*place].last = holder.last;
    holders_[*place].stride = holder.stride;
    holders_[*place].evicted = holder.evicted;
    learn_uniform(holders_[*place].rank);
  }
  std::vector<SetId> sets(image.set_ends.size());
  for (std::size_t i = 0; i < sets.size(); ++i) {
    sets[i] = sets_.of(image.set(i));
    sets_.move(kNobody,
               sets[i]);  // until all blocks are in: a refused block must not free a set
  }
  for (std::size_t i = 0; i < image.hashes.size(); ++i) {
    if (i % kHashesPerSweep == 0) account();
    if (i + kAhead < image.hashes.size()) blocks_.prefetch(image.hashes[i + kAhead]);
    const std::uint64_t hash = image.hashes[i];
    const SetId set = sets[image.set_of[i]];
    const auto [place, is_new] = blocks_.size() < max_blocks_ ? blocks_.insert(hash, set, share_.may_grow())
                                                              : std::pair(blocks_.find(hash), false);
    if (place == nullptr) {
      // The image has no coldness, so any block may be refused.
      ++total_.refused;
      for (const Holding holding : sets_[set]) ++holders_[holding.holder()].evicted;
      continue;
    }
    if (!is_new) throw DamagedImage("a block stands there twice");
    sets_.move(kNobody, set);
    ++held_;
    for (const Holding holding : sets_[set]) {
      for (unsigned tiers = holding.tiers(); tiers != 0; tiers &= tiers - 1) {
        enter(holding.holder(), static_cast<Tier>(std::countr_zero(tiers)), hash);
      }
    }
  }
  for (const SetId set : sets) sets_.move(set, kNobody);
  for (const TableImage::Copies& copies : image.copies) {
    const std::uint32_t* set = blocks_.find(copies.hash);
    if (set == nullptr) continue;  // refused
    if ((sets_.tiers(*set, copies.holder) & tiers_of(Tier::kDevice)) == 0) {
      throw DamagedImage("copies of a block that their holder does not have");
    }
    std::unique_ptr<FlatMap>& more = holders_[copies.holder].more_copies;
    if (!more) {
      more = std::make_unique<FlatMap>(random_seed());
      holders_nbytes_ += more->nbytes();
    }
    const std::size_t nbytes_before = more->nbytes();
    account();
    const auto [place, is_new] = more->insert(copies.hash, copies.more, share_.may_grow());
    holders_nbytes_ += more->nbytes() - nbytes_before;
    if (place == nullptr) continue;  // no room: less is credited than could be
    if (!is_new) throw DamagedImage("copies stand there twice");
    holders_[copies.holder].digests[static_cast<std::size_t>(Tier::kDevice)] +=
        copies.more * digest_of_copy(copies.hash);
  }
  account();
}

TableImage Table::image() const {
  constexpr std::uint32_t kNowhere = ~std::uint32_t{0};
  TableImage image;
  const auto held = read();
  std::vector<HolderId> places(holders_.size(), kNowhere);
  for (HolderId holder = 0; holder < holders_.size(); ++holder) {
    if (!holders_[holder].in_use) continue;
    const Rank& rank = ranks_[holders_[holder].rank];
    const auto place = static_cast<HolderId>(image.holders.size());
    places[holder] = place;
    image.holders.push_back({*workers_[rank.worker].name, rank.dp_rank, holders_[holder].group,
                             holders_[holder].partial, holders_[holder].last, holders_[holder].stride,
                             holders_[holder].evicted});
    if (!holders_[holder].more_copies) continue;
    holders_[holder].more_copies->for_each(
        [&](std::uint64_t hash, std::uint32_t more) { image.copies.push_back({place, more, hash}); });
  }
  image.hashes.reserve(held_);
  image.set_of.reserve(held_);
  std::vector<std::uint32_t> set_places(sets_.limit(), kNowhere);
  blocks_.for_each([&](std::uint64_t hash, SetId set) {
    const auto holdings = sets_[set];
    if (holdings.empty()) return;  // it waits for the sweep
    if (set_places[set] == kNowhere) {
      set_places[set] = static_cast<std::uint32_t>(image.set_ends.size());
      for (const Holding holding : holdings)
        image.holdings.emplace_back(places[holding.holder()], holding.tiers());
      image.set_ends.push_back(image.holdings.size());
    }
    image.hashes.push_back(hash);
    image.set_of.push_back(set_places[set]);
  });
  return image;
}

}  // namespace kvpool
