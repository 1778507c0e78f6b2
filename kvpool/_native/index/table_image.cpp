#include "index/table_image.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "index/packing.h"
#include "index/table.h"
#include "key/checksum.h"

namespace kvpool {
namespace {

static_assert(std::endian::native == std::endian::little, "hashes are written as they lie in memory");

struct Header {
  std::array<char, 8> magic;
  std::uint32_t version;
  std::uint32_t zero;
  std::uint64_t body_nbytes;
  std::uint64_t checksum;  // of everything, this field as zero
};
static_assert(sizeof(Header) == 32);

constexpr std::array<char, 8> kMagic = {'K', 'V', 'P', 'T', 'A', 'B', 'L', 'E'};
constexpr std::uint32_t kVersion = 2;  // 1 has no evictions
constexpr std::size_t kMaxNameNbytes = 256;
constexpr unsigned kTierBits = kTierCount;

std::uint64_t checksum_of(Header header, std::span<const std::byte> body) {
  header.checksum = 0;
  Checksum checksum;
  checksum.update(std::as_bytes(std::span(&header, 1)));
  checksum.update(body);
  return checksum.digest();
}

void append_raw(std::string& out, const void* data, std::size_t nbytes) {
  out.append(static_cast<const char*>(data), nbytes);
}

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : left_(bytes) {}

  std::uint64_t number(std::uint64_t most, const char* what) {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
      const auto byte = static_cast<std::uint64_t>(take(1, what)[0]);
      if (shift == 63 && byte > 1) break;
      value |= (byte & 0x7F) << shift;
      if (byte < 0x80) {
        if (value > most) break;
        return value;
      }
    }
    throw DamagedImage(std::string("there are too many: ") + what);
  }
  // The number of following items of at least so many bytes: memory is taken only for possible counts.
  std::size_t count(std::size_t nbytes_each, const char* what) {
    return static_cast<std::size_t>(number(left_.size() / nbytes_each, what));
  }
  std::span<const std::byte> take(std::size_t nbytes, const char* what) {
    if (nbytes > left_.size()) throw DamagedImage(std::string("it ends within: ") + what);
    const auto taken = left_.first(nbytes);
    left_ = left_.subspan(nbytes);
    return taken;
  }
  bool at_end() const { return left_.empty(); }

 private:
  std::span<const std::byte> left_;
};

void read_sets(Reader& reader, TableImage& image) {
  const std::size_t sets = reader.count(sizeof(std::uint64_t) + 3, "sets of holders");
  image.set_ends.reserve(sets);
  for (std::size_t set = 0; set < sets; ++set) {
    const std::size_t holdings = reader.count(1, "holders of a set");
    if (holdings == 0) throw DamagedImage("a set of holders is empty");
    std::uint64_t holder = 0;
    for (std::size_t i = 0; i < holdings; ++i) {
      const std::uint64_t holding = reader.number(std::uint64_t{kMaxHolders} << kTierBits, "holders");
      const std::uint64_t step = holding >> kTierBits;
      const auto tiers = static_cast<unsigned>(holding & kAllTiers);
      if (tiers == 0 || (i > 0 && step == 0)) throw DamagedImage("a holder makes no sense");
      holder += step;
      if (holder >= image.holders.size()) throw DamagedImage("a holder is not known");
      image.holdings.emplace_back(static_cast<HolderId>(holder), tiers);
    }
    image.set_ends.push_back(image.holdings.size());
    const std::size_t blocks = reader.count(sizeof(std::uint64_t), "blocks");
    if (blocks == 0) throw DamagedImage("a set of holders has no blocks");
    const auto hashes = reader.take(blocks * sizeof(std::uint64_t), "blocks");
    const std::size_t begin = image.hashes.size();
    image.hashes.resize(begin + blocks);
    std::memcpy(image.hashes.data() + begin, hashes.data(), hashes.size());
    image.set_of.resize(begin + blocks, static_cast<std::uint32_t>(set));
  }
}

}  // namespace

std::string pack_image(const TableImage& image) {
  std::string packed(sizeof(Header), '\0');
  packed.reserve(sizeof(Header) + image.hashes.size() * (sizeof(std::uint64_t) + 1));
  const auto number = [&](std::uint64_t value) { packing::append_varint(packed, value); };

  number(image.holders.size());
  for (const TableImage::GroupHolder& holder : image.holders) {
    number(holder.worker.size());
    append_raw(packed, holder.worker.data(), holder.worker.size());
    number(holder.dp_rank);
    number(holder.group);
    number(holder.partial ? 1 : 0);
    number(holder.last);
    number(holder.stride);
    number(holder.evicted);
  }

  // The hashes by set: where those of each set begin, then each to its place.
  std::vector<std::size_t> begins(image.set_ends.size() + 1);
  for (const std::uint32_t set : image.set_of) ++begins[set + 1];
  for (std::size_t set = 1; set < begins.size(); ++set) begins[set] += begins[set - 1];
  std::vector<std::uint64_t> by_set(image.hashes.size());
  std::vector<std::size_t> at(begins.begin(), begins.end() - 1);
  for (std::size_t i = 0; i < image.hashes.size(); ++i) by_set[at[image.set_of[i]]++] = image.hashes[i];

  number(image.set_ends.size());
  for (std::size_t set = 0; set < image.set_ends.size(); ++set) {
    number(image.set(set).size());
    HolderId before = 0;
    for (const Holding holding : image.set(set)) {
      number(std::uint64_t{holding.holder() - before} << kTierBits | holding.tiers());
      before = holding.holder();
    }
    const std::size_t blocks = begins[set + 1] - begins[set];
    number(blocks);
    append_raw(packed, by_set.data() + begins[set], blocks * sizeof(std::uint64_t));
  }

  number(image.copies.size());
  for (const TableImage::Copies& copies : image.copies) {
    number(copies.holder);
    number(copies.more);
    append_raw(packed, &copies.hash, sizeof copies.hash);
  }

  const auto body = std::as_bytes(std::span(packed)).subspan(sizeof(Header));
  Header header{kMagic, kVersion, 0, body.size(), 0};
  header.checksum = checksum_of(header, body);
  std::memcpy(packed.data(), &header, sizeof header);
  return packed;
}

TableImage unpack_image(std::span<const std::byte> packed) {
  Header header;
  if (packed.size() < sizeof header) throw DamagedImage("it ends within its header");
  std::memcpy(&header, packed.data(), sizeof header);
  const auto body = packed.subspan(sizeof header);
  if (header.magic != kMagic) throw DamagedImage("it is no image of a prefix table");
  if (header.version != 1 && header.version != kVersion) {
    throw DamagedImage("it is of version " + std::to_string(header.version) + ", and this is version " +
                       std::to_string(kVersion));
  }
  if (header.body_nbytes != body.size()) throw DamagedImage("its length is wrong");
  if (header.checksum != checksum_of(header, body)) throw DamagedImage("its checksum is wrong");

  // Below, only a faulty or hostile writer fails a check.
  Reader reader(body);
  TableImage image;
  const std::size_t holders = reader.count(7, "holders");
  if (holders > kMaxHolders) throw DamagedImage("there are too many: holders");
  image.holders.reserve(holders);
  for (std::size_t i = 0; i < holders; ++i) {
    const auto nbytes = static_cast<std::size_t>(reader.number(kMaxNameNbytes, "bytes of a name"));
    if (nbytes == 0) throw DamagedImage("a holder has no name");
    const auto name = reader.take(nbytes, "names");
    const auto dp_rank = static_cast<std::uint32_t>(reader.number(kMaxDpRank, "ranks"));
    const auto group = static_cast<std::uint32_t>(reader.number(kMaxGroup, "groups"));
    const bool partial = reader.number(1, "groups") == 1;
    const auto last = static_cast<std::uint32_t>(reader.number(~std::uint32_t{0}, "blocks of a window"));
    const auto stride = static_cast<std::uint32_t>(reader.number(~std::uint32_t{0}, "blocks of a block"));
    if (stride == 0) throw DamagedImage("a group has no blocks");
    const std::uint64_t evicted =
        header.version == 1 ? 0 : reader.number(~std::uint64_t{0}, "evicted blocks");
    image.holders.push_back({std::string(reinterpret_cast<const char*>(name.data()), name.size()), dp_rank,
                             group, partial, last, stride, evicted});
  }
  read_sets(reader, image);
  const std::size_t copies = reader.count(sizeof(std::uint64_t) + 2, "copies");
  image.copies.reserve(copies);
  for (std::size_t i = 0; i < copies; ++i) {
    TableImage::Copies one{};
    one.holder = static_cast<HolderId>(reader.number(kMaxHolders, "copies"));
    one.more = static_cast<std::uint32_t>(reader.number(~std::uint32_t{0}, "copies"));
    std::memcpy(&one.hash, reader.take(sizeof one.hash, "copies").data(), sizeof one.hash);
    if (one.holder >= image.holders.size() || one.more == 0) throw DamagedImage("a copy makes no sense");
    image.copies.push_back(one);
  }
  if (!reader.at_end()) throw DamagedImage("something follows it");
  return image;
}

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
    sets_.move(kNobody, sets[i]);  // until all blocks are in: a refused block must not free a set
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
    account();
    const auto [place, is_new] = add_copies(copies.holder, copies.hash, copies.more);
    if (place == nullptr) continue;
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
