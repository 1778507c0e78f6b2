#include "index/ranking.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "index/packing.h"

namespace kvpool {

using packing::append_column;
using packing::append_text;

namespace {

enum Field : unsigned {
  kRows = 1,
  kTrust,
  kCost,
  kPrefillCost,
  kFetchCost,
  kQueueCost,
  kRunning,
  kWaiting,
  kQueuedTokens,
  kKvUsagePermille,
  kReservedCost,
  kLoadSource,
  kLoadAgeMs,
  kAsleep,
  kReservation,
  kUnreachable,
  kMoveCost,
  kEncodeCost,
};

constexpr double kFreeUsage = 0.8;   // share of a KV cache that costs nothing
constexpr double kMeanOf = 8;        // requests
constexpr double kFirstCost = 8192;  // at most, of the first request at a rank
constexpr double kPlacedS = 900;     // as long as a home is kept
constexpr double kSlow = 2;          // times the typical time: less is prompts of other lengths
constexpr double kSlowest = 64;

// Of a session and a rank: the same on all machines (the finalizer of MurmurHash3).
std::uint64_t rendezvous(std::uint64_t seed, const Rows::Row& rank) {
  const auto mixed = [](std::uint64_t x) {
    x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdULL;
    x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ULL;
    return x ^ (x >> 33);
  };
  std::uint64_t hash = mixed(seed + rank.dp_rank);
  for (const char each : rank.worker) hash = mixed(hash ^ static_cast<std::uint8_t>(each));
  return hash;
}

// Half to even, as Python rounds. Never negative here, and below 2^63 by the limits of its inputs.
std::uint64_t rounded(double value) { return static_cast<std::uint64_t>(std::nearbyint(value)); }

// Tokens of its memory that homes and what was placed without a session take.
std::uint64_t filled(const RankLoad& load, const Ranking::Options& options) {
  return load.session_tokens + rounded(load.placed(options.now_s));
}

}  // namespace

std::optional<RankLoad::Known> RankLoad::known(double now_s, double keep_s) const {
  const bool is_reported = reported_at_s && now_s - *reported_at_s <= keep_s;
  const bool is_scraped = scraped_at_s && now_s - *scraped_at_s <= keep_s;
  const bool sleeps = is_scraped && asleep;
  if (is_reported && (!is_scraped || *reported_at_s >= *scraped_at_s)) {
    return Known{&reported, LoadSource::kReported, now_s - *reported_at_s, sleeps};
  }
  if (is_scraped) return Known{&scraped, LoadSource::kScraped, now_s - *scraped_at_s, sleeps};
  return std::nullopt;
}

std::uint64_t permille(const Load& load) { return rounded(load.kv_usage * 1000); }

void RankLoad::pick(std::uint64_t number, double cost) {
  picked = number;
  // One long prompt among short ones less than doubles the mean.
  cost = std::min(cost, request_cost ? kMeanOf * *request_cost : kFirstCost);
  request_cost = request_cost ? *request_cost + (cost - *request_cost) / kMeanOf : cost;
}

double RankLoad::placed(double now_s) const {
  return placed_tokens * std::exp((placed_at_s - now_s) / kPlacedS);
}

void RankLoad::place(double now_s, std::uint64_t tokens) {
  placed_tokens = placed(now_s) + static_cast<double>(tokens);
  placed_at_s = now_s;
}

double queue_cost(const Load& load, const Costs& costs, double waiting, double done) {
  const double told = load.queued_tokens ? static_cast<double>(*load.queued_tokens)
                                         : waiting * static_cast<double>(load.waiting);
  const double queued = std::max(0.0, told - done);
  // A half-full KV cache admits requests as an empty one does.
  const double tight = std::max(0.0, load.kv_usage - kFreeUsage) / (1 - kFreeUsage);
  return queued + costs.running * static_cast<double>(load.running) + costs.usage * tight;
}

Ranking::Ranking(std::vector<Part> parts, Options options) : parts_(std::move(parts)) {
  choose_home(options);
  double sum = 0;  // 64-bit integers overflow for thousands of the longest queues
  std::uint64_t known = 0;
  for (std::uint32_t part = 0; part < parts_.size(); ++part) {
    for (std::uint32_t row = 0; row < parts_[part].rows->size(); ++row) {
      picks_.push_back(score(part, row, options));
      if (!picks_.back().load) continue;
      sum += static_cast<double>(picks_.back().queue - picks_.back().reserved);
      ++known;
    }
  }
  // An unknown load counts as the mean of the known.
  const std::uint64_t typical = known == 0 ? 0 : rounded(sum / static_cast<double>(known));
  const double speed = typical_speed(options);
  for (Pick& pick : picks_) {
    if (!pick.load) pick.queue += typical;
    slow(pick, speed);
  }
  const auto before = [this](const Pick& a, const Pick& b) { return is_before(a, b); };
  const std::size_t wanted = std::min(options.limit, picks_.size());
  std::ranges::partial_sort(picks_, picks_.begin() + static_cast<std::ptrdiff_t>(wanted), before);
  picks_.resize(wanted);
}

// The median of what is measured; 0: nothing is.
double Ranking::typical_speed(const Options& options) const {
  std::vector<double> speeds;
  if (!options.costs.measures_speed) return 0;
  for (const Part& part : parts_) {
    for (const RankLoad* const load : part.loads) {
      if (load != nullptr && load->speed) speeds.push_back(*load->speed);
    }
  }
  if (speeds.empty()) return 0;
  const auto middle = speeds.begin() + static_cast<std::ptrdiff_t>(speeds.size() / 2);
  std::ranges::nth_element(speeds, middle);
  return *middle;
}

// Of a session whose tokens nobody knows: all indexes choose alike.
void Ranking::choose_home(Options& options) const {
  if (!options.session || !options.session->by_hash) return;
  std::optional<std::uint64_t> least;
  const std::uint64_t tokens = options.prompt_tokens.value_or(0);
  for (std::uint32_t part = 0; part < parts_.size(); ++part) {
    for (std::uint32_t row = 0; row < parts_[part].rows->size(); ++row) {
      const std::uint64_t turn = rendezvous(options.session->seed, (*parts_[part].rows)[row]);
      if (least && turn >= *least) continue;
      least = turn;
      options.session->home = Session::Home{part, row, tokens, tokens, 0};
    }
  }
}

// A rank that takes longer for each token costs as many times more.
void Ranking::slow(Pick& pick, double typical_speed) const {
  const RankLoad* const load = parts_[pick.part].loads[pick.row];
  if (load == nullptr || !load->speed || typical_speed < kSlow * *load->speed) return;
  const double times = std::min(typical_speed / std::max(*load->speed, 1e-9), kSlowest);
  for (std::uint64_t* const term : {&pick.prefill, &pick.fetch, &pick.queue, &pick.move, &pick.encode}) {
    *term = rounded(times * static_cast<double>(*term));
  }
}

Ranking::Pick Ranking::score(std::uint32_t part, std::uint32_t row, const Options& options) const {
  const Answer& answer = *parts_[part].answer;
  const Rows::Row& rank = (*parts_[part].rows)[row];
  const Costs& costs = options.costs;
  Pick pick;
  pick.part = part;
  pick.row = row;
  const bool is_stale = answer.stale[row] != 0;
  if (is_stale) pick.trust = answer.sequences[row] != 0 ? Trust::kDegraded : Trust::kFallback;

  const std::uint64_t size = rank.block_tokens, device = on_device(part, row, options);
  const std::uint64_t local = std::max(device, answer.local[row] * size);
  const std::uint64_t held = std::max(local, answer.loadable[row] * size);
  const std::uint64_t tokens = options.prompt_tokens.value_or(answer.prompt_blocks * size);
  pick.prefill = tokens > held ? tokens - held : 0;
  pick.fresh = tokens > device ? tokens - device : 0;
  const RankLoad* const load = parts_[part].loads[row];
  const double pool_cost =
      load != nullptr && costs.measures_pool ? load->pool_cost.value_or(costs.pool) : costs.pool;
  const double local_cost =
      load != nullptr && costs.measures_local ? load->near_cost.value_or(costs.local) : costs.local;
  pick.fetch = rounded(local_cost * static_cast<double>(local - device) +
                       pool_cost * static_cast<double>(held - local));
  if (const Media* const media = parts_[part].media_of(row)) {
    double tokens_to_encode = 0;
    for (const auto& [end, length] : media->missing) {
      if (end > held) tokens_to_encode += static_cast<double>(length);
    }
    pick.encode = rounded(costs.encode * tokens_to_encode);
  }
  pick.work = pick.prefill + pick.fetch + pick.encode;
  const double again = rank.pool.empty() ? 1 : pool_cost;
  pick.move = rounded(costs.move * again * static_cast<double>(displaced(pick, options, device)));

  const auto known = load == nullptr ? std::nullopt : load->known(options.now_s, options.keep_s);
  pick.turn = load != nullptr ? load->picked : 0;
  if (options.session) {
    const std::uint64_t beside = load != nullptr ? filled(*load, options) : 0;
    const bool is_roomy =
        load != nullptr && load->capacity_tokens && beside + pick.fresh <= *load->capacity_tokens;
    if (options.session->stays) {
      // Among equal ones it goes where others take least, and stays if that is its home; of unknown tokens at home.
      const auto& home = options.session->home;
      const bool is_home = home && home->part == part && home->row == row;
      const std::uint64_t others = beside - (is_home ? std::min(beside, home->counted) : 0);
      pick.crowd = 2 * (options.session->by_hash ? 0 : others) + (is_home ? 0 : 1);
      pick.turn = rendezvous(options.session->seed, rank);
    } else if (is_roomy) {
      pick.turn = rendezvous(options.session->seed, rank);
    } else {
      pick.crowd = 1;  // behind those with room
    }
  }
  if (load != nullptr) {
    pick.queue = pick.reserved = load->reserved_cost;
  }
  if (known) {
    pick.load = *known->load;
    pick.source = known->source;
    pick.asleep = known->asleep;
    pick.load_age_ms = static_cast<std::uint32_t>(rounded(known->age_s * 1000));
    const double waiting =
        costs.measures_waiting ? load->request_cost.value_or(costs.waiting) : costs.waiting;
    const double speed = costs.measures_speed ? load->speed.value_or(costs.speed) : costs.speed;
    pick.queue += rounded(queue_cost(*known->load, costs, waiting, known->age_s * speed));
  } else if (is_stale) {
    const bool failed =
        load != nullptr && load->failed_at_s && options.now_s - *load->failed_at_s <= options.keep_failed_s;
    pick.unreachable = failed || (rank.state->has_feed && answer.staleness_ms[row] > options.keep_s * 1000);
  }
  return pick;
}

// Tokens of the prompt in the rank's accelerator memory.
std::uint64_t Ranking::on_device(std::uint32_t part, std::uint32_t row, const Options& options) const {
  const Answer& answer = *parts_[part].answer;
  const std::uint64_t known = std::uint64_t{answer.device[row]} * (*parts_[part].rows)[row].block_tokens;
  if (!options.session || !options.session->home) return known;
  const auto& home = *options.session->home;
  if (home.part != part || home.row != row) return known;
  return std::max(known, answer.stale[row] != 0 ? home.kept_if_stale : home.kept);
}

// Tokens of others that a session's blocks take the memory of: a moved one of as many as it brings, as ranks are mostly
// full; one that begins of what sessions there, and what was placed without one, leave no room for.
std::uint64_t Ranking::displaced(const Pick& pick, const Options& options, std::uint64_t device) const {
  if (!options.session || !options.session->stays) return 0;
  if (const auto& home = options.session->home) {
    const std::uint64_t at_home = on_device(home->part, home->row, options);
    return at_home > device ? at_home - device : 0;  // never at home
  }
  const RankLoad* const load = parts_[pick.part].loads[pick.row];
  if (load == nullptr || !load->capacity_tokens) return 0;
  const std::uint64_t wanted = filled(*load, options) + pick.fresh;
  return wanted > *load->capacity_tokens ? std::min(pick.fresh, wanted - *load->capacity_tokens) : 0;
}

bool Ranking::is_before(const Pick& a, const Pick& b) const {
  const auto key = [](const Pick& pick) {
    return std::tuple(pick.unreachable, pick.asleep, pick.cost(), pick.queue, pick.crowd, pick.turn);
  };
  const auto ours = key(a), theirs = key(b);
  if (ours != theirs) return ours < theirs;
  if (a.part == b.part) return a.row < b.row;  // by name and rank
  const Rows::Row &row = row_of(a), &other = row_of(b);
  return std::tie(row.worker, row.dp_rank) < std::tie(other.worker, other.dp_rank);
}

std::string Ranking::pack(std::string_view reservation) const {
  std::string out;
  append_text(out, kRows, pack_rows());
  if (picks_.empty()) return out;
  out.reserve(out.size() + picks_.size() * 40);
  const auto column = [&](Field field, auto number) {
    append_column(out, field, picks_.size(),
                  [&](std::size_t i) { return static_cast<std::uint64_t>(number(picks_[i])); });
  };
  const auto of_load = [&](Field field, auto number) {
    column(field, [&](const Pick& pick) { return pick.load ? number(*pick.load) : 0; });
  };
  column(kTrust, [](const Pick& pick) { return pick.trust; });
  column(kCost, [](const Pick& pick) { return pick.cost(); });
  column(kPrefillCost, [](const Pick& pick) { return pick.prefill; });
  column(kFetchCost, [](const Pick& pick) { return pick.fetch; });
  column(kQueueCost, [](const Pick& pick) { return pick.queue; });
  of_load(kRunning, [](const Load& load) { return std::uint64_t{load.running}; });
  of_load(kWaiting, [](const Load& load) { return std::uint64_t{load.waiting}; });
  of_load(kQueuedTokens, [](const Load& load) { return load.queued_tokens.value_or(0); });
  of_load(kKvUsagePermille, permille);
  column(kReservedCost, [](const Pick& pick) { return pick.reserved; });
  column(kLoadSource, [](const Pick& pick) { return pick.source; });
  column(kLoadAgeMs, [](const Pick& pick) { return pick.load_age_ms; });
  column(kAsleep, [](const Pick& pick) { return pick.asleep; });
  if (!reservation.empty()) append_text(out, kReservation, reservation);
  column(kUnreachable, [](const Pick& pick) { return pick.unreachable; });
  if (std::ranges::any_of(picks_, [](const Pick& pick) { return pick.move != 0; })) {
    column(kMoveCost, [](const Pick& pick) { return pick.move; });
  }
  if (std::ranges::any_of(picks_, [](const Pick& pick) { return pick.encode != 0; })) {
    column(kEncodeCost, [](const Pick& pick) { return pick.encode; });
  }
  return out;
}

std::string Ranking::pack_rows() const {
  std::string out;
  if (picks_.empty()) return out;
  out.reserve(picks_.size() * 80);
  using enum lookup_response::Field;
  const std::size_t count = picks_.size();
  for (const Pick& pick : picks_) append_text(out, kWorker, row_of(pick).worker);
  append_column(out, kDpRank, count, [&](std::size_t i) { return row_of(picks_[i]).dp_rank; });
  for (const Pick& pick : picks_) append_text(out, kAddress, row_of(pick).address);
  append_column(out, kBlockTokens, count, [&](std::size_t i) { return row_of(picks_[i]).block_tokens; });
  append_columns(out, count, [&](std::size_t i) {
    return std::pair(part_of(picks_[i]).answer, std::size_t{picks_[i].row});
  });
  const auto held = [&](const Pick& pick) { return held_media(pick); };
  if (std::ranges::any_of(picks_, held)) {
    append_column(out, kPoolMedia, count, [&](std::size_t i) { return std::uint64_t{held(picks_[i])}; });
  }
  return out;
}

}  // namespace kvpool
