// Ranks of some answers sorted by the prompt's cost there, and RouteResponse packed from them
// (protos/kvpool/v1/index.proto). kvpool/index/cost/router.py has the formula.
//
// No locks: the inputs do not change meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "index/answer.h"

namespace kvpool {

struct Load {
  std::uint32_t running = 0;  // requests
  std::uint32_t waiting = 0;
  std::optional<std::uint64_t> queued_tokens;  // nothing: unknown
  double kv_usage = 0;                         // from 0 to 1
};

// As protobuf numbers them.
enum class LoadSource : std::uint8_t { kNone, kReported, kScraped };
enum class Trust : std::uint8_t { kExact = 1, kDegraded, kFallback };

// A rank's last load, and the costs reserved there. Times are seconds of one clock.
struct RankLoad {
  struct Known {
    const Load* load;
    LoadSource source;
    double age_s;
    bool asleep;
  };

  // The later of both sources, if at most keep_s old; else nothing.
  std::optional<Known> known(double now_s, double keep_s) const;

  Load reported, scraped;
  std::optional<double> reported_at_s, scraped_at_s;
  std::optional<double> failed_at_s;             // since the last page
  bool asleep = false;                           // as scraped
  std::optional<double> pool_cost;               // per token from the pool, measured; nothing: unknown
  std::optional<double> near_cost;               // and from the near pool of its host
  std::optional<double> speed;                   // tokens that it computes in a second, measured
  std::uint64_t session_tokens = 0;              // of the sessions whose home it is
  std::optional<std::uint64_t> capacity_tokens;  // of its KV cache; nothing: unknown
  // Mean of recently placed requests; nothing: none yet.
  std::optional<double> request_cost;
  std::uint64_t reserved_cost = 0;
  std::uint64_t picked = 0;  // number of its last pick

  // The rank is the best for a request of this cost.
  void pick(std::uint64_t number, double cost);

  // Tokens that requests without a session brought: those of kPlacedS ago count a third.
  double placed(double now_s) const;
  void place(double now_s, std::uint64_t tokens);
  double placed_tokens = 0, placed_at_s = 0;
};

// Coefficients, in tokens of a prompt to compute. `speed`: prompt tokens that a rank of unknown speed computes in a
// second, by which a reported queue has shrunk. `move`: tokens that are fetched again for each one that a session
// displaces. `encode`: of a token of an item that the rank's encoder computes.
struct Costs {
  double local, pool, waiting, running, usage, speed, move, encode;
  // A rank's measured value replaces `local`, `pool`, `waiting`, or `speed`.
  bool measures_local, measures_pool, measures_waiting, measures_speed;
};

std::uint64_t permille(const Load& load);  // of its KV cache in use
// Work before a request, without reservations. `waiting`: of a waiting request. `done`: tokens since.
double queue_cost(const Load& load, const Costs& costs, double waiting, double done);

class Ranking {
 public:
  // Of the prompt's images, clips and sounds, as ranks of one kind of encoder find them in the pool.
  struct Media {
    struct Item {
      std::uint64_t end, tokens;
    };
    std::uint32_t held;
    std::vector<Item> missing;
  };
  struct Part {
    const Rows* rows;
    const Answer* answer;
    std::vector<const RankLoad*> loads;  // by row; null: no load yet
    std::vector<Media> media;            // by kind of encoder; none: the prompt has no items
    std::vector<std::uint32_t> kinds;    // by row
    const Media* media_of(std::uint32_t row) const { return media.empty() ? nullptr : &media[kinds[row]]; }
  };
  // Of a request. `seed`: orders equal ranks, in all indexes alike. `stays`: its requests follow each other; else only
  // its name is shared. `by_hash`: nobody knows its tokens, and the home is the rank that the seed chooses. Of a home
  // `kept`: tokens of the prompt that it holds, whatever its events told; `kept_if_stale`: unless they tell the truth;
  // `counted`: tokens that the session counts there.
  struct Session {
    struct Home {
      std::uint32_t part, row;
      std::uint64_t kept, kept_if_stale, counted;
    };
    std::uint64_t seed;
    bool stays;
    bool by_hash;
    std::optional<Home> home;
  };
  struct Options {
    Costs costs;
    std::optional<std::uint64_t> prompt_tokens;  // nothing: those of its full blocks
    double now_s;
    double keep_s;         // loads
    double keep_failed_s;  // failures to read a page
    std::size_t limit;     // picks
    std::optional<Session> session;
  };
  struct Pick {
    std::uint32_t part = 0, row = 0;
    Trust trust = Trust::kExact;
    LoadSource source = LoadSource::kNone;
    bool asleep = false;
    bool unreachable = false;
    std::uint32_t load_age_ms = 0;
    std::uint64_t prefill = 0, fetch = 0, queue = 0, move = 0, encode = 0, reserved = 0;
    std::uint64_t work = 0;    // prefill, fetch and encode, in tokens that this rank computes
    std::uint64_t fresh = 0;   // tokens of the prompt that are not in its device memory
    std::uint64_t crowd = 0;   // of equal costs the least first: score()
    std::uint64_t turn = 0;    // orders equal picks
    std::optional<Load> load;  // nothing: unknown
    std::uint64_t cost() const { return prefill + fetch + queue + move + encode; }
  };

  // The rows and answers of `parts` must outlive it.
  Ranking(std::vector<Part> parts, Options options);

  const std::vector<Pick>& picks() const { return picks_; }
  const Part& part_of(const Pick& pick) const { return parts_[pick.part]; }
  const Rows::Row& row_of(const Pick& pick) const { return (*parts_[pick.part].rows)[pick.row]; }
  // Of the prompt's items, those whose outputs the pool has for it.
  std::uint32_t held_media(const Pick& pick) const {
    const Media* const media = part_of(pick).media_of(pick.row);
    return media == nullptr ? 0 : media->held;
  }
  std::string pack(std::string_view reservation) const;

 private:
  double typical_speed(const Options& options) const;
  void choose_home(Options& options) const;
  Pick score(std::uint32_t part, std::uint32_t row, const Options& options) const;
  void slow(Pick& pick, double typical_speed) const;
  std::uint64_t on_device(std::uint32_t part, std::uint32_t row, const Options& options) const;
  std::uint64_t displaced(const Pick& pick, const Options& options, std::uint64_t device) const;
  bool is_before(const Pick& a, const Pick& b) const;
  std::string pack_rows() const;

  std::vector<Part> parts_;
  std::vector<Pick> picks_;
};

}  // namespace kvpool
