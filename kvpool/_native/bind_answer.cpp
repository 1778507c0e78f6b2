// Python bindings of index/: the answers of lookups, and rankings of them.
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <memory>
#include <tuple>

#include "bind_table.h"
#include "index/answer.h"
#include "index/json_numbers.h"
#include "index/lookup_request.h"
#include "index/ranking.h"

namespace kvpool {
namespace {

class PyAnswer {
 public:
  PyAnswer(std::shared_ptr<const Rows> rows, Answer answer)
      : rows_(std::move(rows)), answer_(std::move(answer)) {}

  Answer& native() { return answer_; }
  const Answer& native() const { return answer_; }
  const Rows& rows() const { return *rows_; }
  nb::tuple moved() const { return to_tuple(answer_.moved); }
  nb::tuple columns() const {
    return nb::make_tuple(to_tuple(std::vector(rows_->size(), answer_.prompt_blocks)),
                          to_tuple(answer_.device), to_tuple(answer_.local), to_tuple(answer_.pool),
                          to_tuple(answer_.sequences), to_tuple(answer_.staleness_ms),
                          to_tuple(std::vector<bool>(answer_.stale.begin(), answer_.stale.end())),
                          to_tuple(answer_.loadable));
  }
  nb::tuple most() const {
    const auto most_of = [](const std::vector<std::uint32_t>& blocks) {
      return blocks.empty() ? 0 : std::ranges::max(blocks);
    };
    return nb::make_tuple(answer_.prompt_blocks, most_of(answer_.device), most_of(answer_.local),
                          most_of(answer_.pool));
  }
  nb::bytes pack() const {
    const std::string packed = rows_->pack(answer_);
    return nb::bytes(packed.data(), packed.size());
  }

 private:
  template <typename Number>
  static nb::tuple to_tuple(const std::vector<Number>& column) {
    nb::list numbers;
    for (const Number number : column) numbers.append(number);
    return nb::tuple(numbers);
  }

  std::shared_ptr<const Rows> rows_;
  Answer answer_;
};

using PyRow = std::tuple<std::string, std::uint32_t, std::string, std::uint32_t, std::string, std::string,
                         const RankState*>;

class PyRows {
 public:
  PyRows(const nb::tuple& rows, bool are_all) : kept_(rows) {
    std::vector<Rows::Row> native;
    for (const nb::handle row : rows) {
      native.push_back(std::make_from_tuple<Rows::Row>(nb::cast<PyRow>(row)));
    }
    rows_ = std::make_shared<const Rows>(std::move(native), are_all);
  }

  PyAnswer answer(const PyTable& table, nb::handle hashes64, std::int64_t now_ms, bool at_once) const {
    const Bytes hashes(hashes64);
    return {rows_, without_gil([&] {
              return rows_->answer(table.native(), hashes.get(), now_ms, patience_of(at_once));
            })};
  }
  void again(std::size_t row, const PyTable& table, nb::handle hashes64, std::int64_t now_ms,
             PyAnswer& answer, bool at_once) const {
    const Bytes hashes(hashes64);
    without_gil([&] {
      rows_->again(row, table.native(), hashes.get(), now_ms, answer.native(), patience_of(at_once));
    });
  }

 private:
  static Patience patience_of(bool at_once) { return at_once ? Patience::kAtOnce : Patience::kFull; }

  nb::tuple kept_;  // the RankStates
  std::shared_ptr<const Rows> rows_;
};

nb::object py_known(const RankLoad& load, double now_s, double keep_s) {
  const auto known = load.known(now_s, keep_s);
  if (!known) return nb::none();
  const Load& told = *known->load;
  return nb::make_tuple(nb::make_tuple(told.running, told.waiting, told.queued_tokens, told.kv_usage),
                        static_cast<int>(known->source), known->age_s, known->asleep);
}

// Under the GIL, as all that changes a RankLoad.
class PyRanking {
 public:
  using Costs8 = std::tuple<double, double, double, double, double, double, bool, bool>;

  PyRanking(const nb::list& parts, const Costs8& costs, std::optional<std::uint64_t> prompt_tokens,
            double now_s, double keep_s, double keep_failed_s, std::optional<std::size_t> limit)
      : kept_(parts) {
    std::vector<Ranking::Part> native;
    for (const nb::handle part : parts) {
      const auto& answer = nb::cast<const PyAnswer&>(part[0]);
      Ranking::Part made{&answer.rows(), &answer.native(), {}};
      made.loads.reserve(answer.rows().size());
      for (const nb::handle load : nb::cast<nb::list>(part[1])) {
        made.loads.push_back(load.is_none() ? nullptr : nb::cast<const RankLoad*>(load));
      }
      if (made.loads.size() != answer.rows().size()) throw std::invalid_argument("one load a row");
      native.push_back(std::move(made));
    }
    ranking_ = std::make_unique<Ranking>(
        std::move(native), Ranking::Options{std::make_from_tuple<Costs>(costs), prompt_tokens, now_s, keep_s,
                                            keep_failed_s, limit.value_or(~std::size_t{0})});
  }

  std::size_t size() const { return ranking_->picks().size(); }
  nb::tuple best() const {
    const Ranking::Pick& pick = ranking_->picks().at(0);
    return nb::make_tuple(pick.part, pick.row, pick.prefill + pick.fetch);
  }
  nb::bytes pack(std::string_view reservation) const {
    const std::string packed = ranking_->pack(reservation);
    return nb::bytes(packed.data(), packed.size());
  }
  nb::list picks() const {
    nb::list picks;
    for (const Ranking::Pick& pick : ranking_->picks()) {
      const Rows::Row& row = ranking_->row_of(pick);
      const Answer& answer = *ranking_->part_of(pick).answer;
      const std::size_t i = pick.row;
      const Load load = pick.load.value_or(Load{});
      picks.append(nb::make_tuple(
          nb::make_tuple(to_str(row.worker), row.dp_rank, to_str(row.address), row.block_tokens,
                         answer.prompt_blocks, answer.device[i], answer.local[i], answer.pool[i],
                         answer.sequences[i], answer.staleness_ms[i], answer.stale[i] != 0,
                         answer.loadable[i]),
          static_cast<int>(pick.trust), pick.cost(), pick.prefill, pick.fetch, pick.queue, load.running,
          load.waiting, load.queued_tokens.value_or(0), permille(load), pick.reserved,
          static_cast<int>(pick.source), pick.load_age_ms, pick.asleep, pick.unreachable));
    }
    return picks;
  }

 private:
  nb::list kept_;
  std::unique_ptr<Ranking> ranking_;
};

nb::object py_read_lookup_request(nb::handle packed) {
  const Bytes message(packed);
  const std::optional<LookupRequest> request = read_lookup_request(message.get());
  if (!request) return nb::none();
  nb::list workers;
  for (const std::string_view name : request->workers) workers.append(to_str(name));
  const auto begin = static_cast<std::size_t>(request->prompt.data() - message.get().data());
  return nb::make_tuple(to_str(request->model), to_str(request->tenant), workers, request->in_tokens, begin,
                        begin + request->prompt.size());
}

nb::bytes py_json_numbers(nb::handle text, std::size_t most, std::uint64_t highest, bool is_signed) {
  const Bytes bytes(text);
  const auto numbers = without_gil([&] {
    const std::string_view view(reinterpret_cast<const char*>(bytes.get().data()), bytes.get().size());
    return json_numbers(view, most, highest, is_signed);
  });
  return nb::bytes(numbers.data(), numbers.size() * sizeof(std::uint64_t));
}

}  // namespace

void bind_answer(nb::module_& m) {
  m.def("json_numbers", &py_json_numbers, "text"_a.none(), "most"_a, "highest"_a, "is_signed"_a);
  nb::class_<RankState>(m, "RankState")
      .def(nb::init<>())
      .def_prop_rw(
          "version", [](const RankState& state) { return state.version.load(); },
          [](RankState& state, std::uint64_t version) { state.version = version; })
      .def_prop_rw(
          "sequence", [](const RankState& state) { return state.sequence.load(); },
          [](RankState& state, std::uint64_t sequence) { state.sequence = sequence; })
      .def_prop_rw(
          "heard_at_ms", [](const RankState& state) { return state.heard_at_ms.load(); },
          [](RankState& state, std::int64_t heard_at_ms) { state.heard_at_ms = heard_at_ms; })
      .def_prop_rw(
          "stale", [](const RankState& state) { return state.stale.load(); },
          [](RankState& state, bool stale) { state.stale = stale; })
      .def_prop_rw(
          "has_feed", [](const RankState& state) { return state.has_feed.load(); },
          [](RankState& state, bool has_feed) { state.has_feed = has_feed; });
  nb::class_<PyAnswer>(m, "Answer")
      .def("moved", &PyAnswer::moved)
      .def("columns", &PyAnswer::columns)
      .def("most", &PyAnswer::most)
      .def("pack", &PyAnswer::pack);
  nb::class_<PyRows>(m, "Rows")
      .def(nb::init<const nb::tuple&, bool>(), "rows"_a, "are_all"_a)
      .def("answer", &PyRows::answer, "table"_a, "hashes64"_a, "now_ms"_a, "at_once"_a)
      .def("again", &PyRows::again, "row"_a, "table"_a, "hashes64"_a, "now_ms"_a, "answer"_a, "at_once"_a);
  nb::class_<RankLoad>(m, "RankLoad")
      .def(nb::init<>())
      .def(
          "report",
          [](RankLoad& load, double now_s, std::uint32_t running, std::uint32_t waiting,
             std::optional<std::uint64_t> queued_tokens, double kv_usage) {
            load.reported = {running, waiting, queued_tokens, kv_usage};
            load.reported_at_s = now_s;
          },
          "now_s"_a, "running"_a, "waiting"_a, "queued_tokens"_a.none(), "kv_usage"_a)
      .def(
          "scrape",
          [](RankLoad& load, double now_s, std::uint32_t running, std::uint32_t waiting,
             std::optional<std::uint64_t> queued_tokens, double kv_usage, bool asleep) {
            load.scraped = {running, waiting, queued_tokens, kv_usage};
            load.scraped_at_s = now_s;
            load.asleep = asleep;
            load.failed_at_s.reset();
          },
          "now_s"_a, "running"_a, "waiting"_a, "queued_tokens"_a.none(), "kv_usage"_a, "asleep"_a)
      .def(
          "fail", [](RankLoad& load, double now_s) { load.failed_at_s = now_s; }, "now_s"_a)
      .def("known", &py_known, "now_s"_a, "keep_s"_a)
      .def_rw("pool_cost", &RankLoad::pool_cost)
      .def_rw("reserved_cost", &RankLoad::reserved_cost)
      .def("pick", &RankLoad::pick, "number"_a, "cost"_a);
  nb::class_<PyRanking>(m, "Ranking")
      .def(nb::init<const nb::list&, const PyRanking::Costs8&, std::optional<std::uint64_t>, double, double,
                    double, std::optional<std::size_t>>(),
           "parts"_a, "costs"_a, "prompt_tokens"_a.none(), "now_s"_a, "keep_s"_a, "keep_failed_s"_a,
           "limit"_a.none())
      .def("__len__", &PyRanking::size)
      .def("best", &PyRanking::best)
      .def("pack", &PyRanking::pack, "reservation"_a)
      .def("picks", &PyRanking::picks);
  m.def("read_lookup_request", &py_read_lookup_request, "packed"_a);
}

}  // namespace kvpool
