// Python bindings of index/: tables and their images, answers of lookups, rankings of them. Over 400 lines because each
// of these holds the one before.
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "index/answer.h"
#include "index/json_size.h"
#include "index/lookup_request.h"
#include "index/ranking.h"
#include "index/table.h"
#include "index/token_list.h"

namespace kvpool {
namespace {

constexpr std::size_t kMaxPromptBlocks = std::size_t{1} << 22;

std::string_view utf8_view(nb::handle text, const char* what) {
  Py_ssize_t nbytes = 0;
  if (!PyUnicode_Check(text.ptr())) throw nb::type_error(what);
  const char* data = PyUnicode_AsUTF8AndSize(text.ptr(), &nbytes);
  if (data == nullptr) {
    PyErr_Clear();
    throw std::invalid_argument("a worker's name is not Unicode");
  }
  return {data, static_cast<std::size_t>(nbytes)};
}

template <typename Number>
nb::tuple to_tuple(const std::vector<Number>& column) {
  nb::list numbers;
  for (const Number number : column) numbers.append(number);
  return nb::tuple(numbers);
}

nb::tuple to_tuple(const Applied& applied) {
  std::vector<std::uint64_t> counts;
  for (const auto field : kAppliedFields) counts.push_back(applied.*field);
  return to_tuple(counts);
}

class PyTable {
 public:
  // As Table's constructors.
  template <typename... Args>
  explicit PyTable(Args... args) : table_(std::make_unique<Table>(std::move(args)...)) {}
  PyTable(const PyTable&) = delete;
  PyTable& operator=(const PyTable&) = delete;
  ~PyTable() {
    without_gil([this] { table_.reset(); });
  }

  Table& native() const { return *table_; }

  nb::tuple apply(nb::handle worker, nb::handle payload, std::uint32_t dp_rank, nb::handle pool,
                  nb::handle near) {
    const std::string_view name = utf8_view(worker, "worker must be a str");
    std::optional<std::string_view> pool_name, near_name;
    if (!pool.is_none()) pool_name = utf8_view(pool, "pool must be a str or None");
    if (!near.is_none()) near_name = utf8_view(near, "near must be a str or None");
    const Bytes bytes(payload);
    try {
      return to_tuple(without_gil(
          [&] { return table_->apply(name, dp_rank, decode_events(bytes.get()), pool_name, near_name); }));
    } catch (const MalformedEvents&) {
      ++malformed_batches_;  // under the GIL again
      throw;
    }
  }

  Matches match(nb::handle hashes64, nb::handle workers) const {
    std::vector<std::string_view> names;
    nb::tuple held;  // of our own: the names must live for as long as the call
    if (!workers.is_none()) {
      if (PyUnicode_Check(workers.ptr()))
        throw nb::type_error("workers must be a sequence of str, not one str");
      held = nb::tuple(workers);
      for (nb::handle worker : held) {
        names.push_back(utf8_view(worker, "workers must be a sequence of str"));
      }
    }
    const Bytes bytes(hashes64);
    if (bytes.get().size() % sizeof(std::uint64_t) != 0) {
      throw std::invalid_argument("hashes64 is packed 64-bit integers: its length is a multiple of 8");
    }
    if (bytes.get().size() / sizeof(std::uint64_t) > kMaxPromptBlocks) {
      throw std::invalid_argument("a prompt has at most 4194304 blocks");
    }
    return without_gil([&] { return table_->match(bytes.get(), workers.is_none() ? nullptr : &names); });
  }

  nb::list pooled(nb::handle worker, nb::handle hashes64, bool at_once) const {
    const std::string_view name = utf8_view(worker, "worker must be a str");
    const Bytes bytes(hashes64);
    const std::vector<bool> found = without_gil(
        [&] { return table_->pooled(name, bytes.get(), at_once ? Patience::kAtOnce : Patience::kFull); });
    nb::list answers;
    for (const bool one : found) answers.append(one);
    return answers;
  }

  nb::dict stats() const {
    const TableStats stats = without_gil([this] { return table_->stats(); });
    nb::dict result;
    result["applied"] = to_tuple(stats.applied);
    result["batches"] = stats.batches;
    result["malformed_batches"] = malformed_batches_;
    result["blocks"] = stats.blocks;
    result["holder_sets"] = stats.holder_sets;
    result["workers"] = stats.workers;
    result["holders"] = stats.holders;
    result["copies"] = stats.copies;
    result["unswept"] = stats.unswept;
    result["nbytes"] = stats.nbytes;
    result["tier_blocks"] = stats.tier_blocks;
    return result;
  }

 private:
  std::unique_ptr<Table> table_;
  std::uint64_t malformed_batches_ = 0;
};

// A method of the table that takes a worker's name first.
template <typename... Args>
auto of_worker(auto method) {
  return [method](const PyTable& table, nb::handle worker, Args... args) {
    const std::string_view name = utf8_view(worker, "worker must be a str");
    return without_gil([&] { return std::invoke(method, table.native(), name, args...); });
  };
}

struct PyAnswer {
  std::shared_ptr<const Rows> rows;
  Answer native;

  nb::tuple columns() const {
    return nb::make_tuple(to_tuple(std::vector(rows->size(), native.prompt_blocks)), to_tuple(native.device),
                          to_tuple(native.local), to_tuple(native.pool), to_tuple(native.sequences),
                          to_tuple(native.staleness_ms),
                          to_tuple(std::vector<bool>(native.stale.begin(), native.stale.end())),
                          to_tuple(native.loadable));
  }
  nb::tuple most() const {
    const auto most_of = [](const std::vector<std::uint32_t>& blocks) {
      return blocks.empty() ? 0 : std::ranges::max(blocks);
    };
    return nb::make_tuple(native.prompt_blocks, most_of(native.device), most_of(native.local),
                          most_of(native.pool));
  }
};

class PyRows {
 public:
  using Row = std::tuple<std::string, std::uint32_t, std::string, std::uint32_t, std::string, std::string,
                         std::string, const RankState*>;

  PyRows(const nb::tuple& rows, bool are_all) : kept_(rows) {
    std::vector<Rows::Row> native;
    for (const nb::handle row : rows) {
      native.push_back(std::make_from_tuple<Rows::Row>(nb::cast<Row>(row)));
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
      rows_->again(row, table.native(), hashes.get(), now_ms, answer.native, patience_of(at_once));
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
  using Numbers =
      std::tuple<double, double, double, double, double, double, double, double, bool, bool, bool, bool>;
  using Home = std::tuple<std::uint32_t, std::uint32_t, std::uint64_t, std::uint64_t, std::uint64_t>;
  using Session = std::tuple<std::uint64_t, bool, bool, std::optional<Home>>;
  using Kind = std::tuple<std::uint32_t, std::vector<std::tuple<std::uint64_t, std::uint64_t>>>;

  PyRanking(const nb::list& parts, const Numbers& costs, std::optional<std::uint64_t> prompt_tokens,
            double now_s, double keep_s, double keep_failed_s, std::optional<std::size_t> limit,
            const std::optional<Session>& session)
      : kept_(parts) {
    std::vector<Ranking::Part> native;
    for (const nb::handle part : parts) {
      const auto& answer = nb::cast<const PyAnswer&>(part[0]);
      Ranking::Part made{answer.rows.get(), &answer.native, {}, {}, {}};
      made.loads.reserve(answer.rows->size());
      for (const nb::handle load : nb::cast<nb::list>(part[1])) {
        made.loads.push_back(load.is_none() ? nullptr : nb::cast<const RankLoad*>(load));
      }
      if (made.loads.size() != answer.rows->size()) throw std::invalid_argument("one load a row");
      if (const nb::handle media = part[2]; !media.is_none()) add_media(media, made);
      native.push_back(std::move(made));
    }
    Ranking::Options options{std::make_from_tuple<Costs>(costs), prompt_tokens, now_s, keep_s, keep_failed_s,
                             limit.value_or(~std::size_t{0}),    std::nullopt};
    if (session) {
      const auto& [seed, stays, by_hash, home] = *session;
      options.session = Ranking::Session{seed, stays, by_hash, std::nullopt};
      if (home) {
        const auto& [part, row, kept, kept_if_stale, counted] = *home;
        if (part >= native.size() || row >= native[part].rows->size()) {
          throw std::invalid_argument("a home is one of the rows");
        }
        options.session->home = Ranking::Session::Home{part, row, kept, kept_if_stale, counted};
      }
    }
    ranking_ = std::make_unique<Ranking>(std::move(native), options);
  }

  std::size_t size() const { return ranking_->picks().size(); }
  nb::tuple best() const {
    const Ranking::Pick& pick = ranking_->picks().at(0);
    return nb::make_tuple(pick.part, pick.row, pick.work, pick.fresh);
  }
  nb::bytes pack(std::string_view reservation) const { return to_bytes(ranking_->pack(reservation)); }
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
                         answer.loadable[i], ranking_->held_media(pick)),
          static_cast<int>(pick.trust), pick.cost(), pick.prefill, pick.fetch, pick.queue, load.running,
          load.waiting, load.queued_tokens.value_or(0), permille(load), pick.reserved,
          static_cast<int>(pick.source), pick.load_age_ms, pick.asleep, pick.unreachable, pick.move,
          pick.encode));
    }
    return picks;
  }

 private:
  static void add_media(nb::handle media, Ranking::Part& part) {
    for (const auto& [held, missing] : nb::cast<std::vector<Kind>>(media[0])) {
      part.media.push_back({held, {}});
      Ranking::Media& made = part.media.back();
      for (const auto& [end, tokens] : missing) made.missing.push_back({end, tokens});
    }
    part.kinds = nb::cast<std::vector<std::uint32_t>>(media[1]);
    const auto is_known = [&](std::uint32_t kind) { return kind < part.media.size(); };
    if (part.kinds.size() != part.rows->size() || !std::ranges::all_of(part.kinds, is_known)) {
      throw std::invalid_argument("one kind a row");
    }
  }

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

std::pair<std::size_t, std::size_t> py_json_size(nb::handle text) {
  const Bytes bytes(text);
  const JsonSize size = json_size(bytes.get());
  return {size.commas, size.containers};
}

nb::bytes py_token_list(nb::handle text, std::size_t most) {
  const Bytes bytes(text);
  return to_bytes(without_gil([&] {
    return read_token_list({reinterpret_cast<const char*>(bytes.get().data()), bytes.get().size()}, most);
  }));
}

// An atomic field of RankState.
template <auto kField>
void def_field(nb::class_<RankState>& states, const char* name) {
  using Value = decltype((std::declval<RankState&>().*kField).load());
  states.def_prop_rw(
      name, [](const RankState& state) { return (state.*kField).load(); },
      [](RankState& state, Value value) { state.*kField = value; });
}

}  // namespace

void bind_index(nb::module_& m) {
  const nb::exception<MalformedEvents> malformed(m, "MalformedEvents", PyExc_ValueError);
  nb::exception<ClearedTooOften>(m, "ClearedTooOften", malformed.ptr());
  nb::exception<TooMuchWork>(m, "TooMuchWork", PyExc_RuntimeError);
  nb::exception<NotAtOnce>(m, "NotAtOnce", PyExc_RuntimeError);
  nb::exception<DamagedImage>(m, "DamagedImage", PyExc_ValueError);
  nb::class_<Matches>(m, "Matches")
      .def("__len__", [](const Matches& matches) { return matches.workers.size(); })
      .def("workers",
           [](const Matches& matches) {
             nb::list names;
             for (const auto& name : matches.workers) names.append(to_str(*name));
             return names;
           })
      .def("dp_ranks", [](const Matches& matches) { return to_bytes(matches.dp_ranks); })
      .def(
          "column",
          [](const Matches& matches, std::size_t column) { return to_bytes(matches.columns.at(column)); },
          "column"_a);
  nb::class_<MemoryBudget>(m, "MemoryBudget")
      .def(nb::init<std::size_t>(), "limit_nbytes"_a)
      .def_prop_ro("used_nbytes", [](const MemoryBudget& budget) { return budget.used_nbytes.load(); });
  nb::class_<TableImage>(m, "TableImage").def("pack", [](const TableImage& image) {
    return to_bytes(without_gil([&] { return pack_image(image); }));
  });
  // .none(): our own errors say more than nanobind's.
  nb::class_<PyTable>(m, "Table")
      .def(nb::init<std::size_t, bool, std::uint32_t, std::shared_ptr<MemoryBudget>>(), "max_blocks"_a,
           "reuse_reports"_a, "block_tokens"_a, "budget"_a.none())
      .def("apply", &PyTable::apply, "worker"_a.none(), "payload"_a.none(), "dp_rank"_a, "pool"_a.none(),
           "near"_a.none())
      .def("match", &PyTable::match, "hashes64"_a.none(), "workers"_a.none())
      .def("pooled", &PyTable::pooled, "worker"_a.none(), "hashes64"_a.none(), "at_once"_a)
      .def("remove_worker", of_worker<>(&Table::remove_worker), "worker"_a.none())
      .def("clear", of_worker<std::optional<std::uint32_t>, Tiers>(&Table::clear), "worker"_a.none(),
           "dp_rank"_a.none(), "tiers"_a)
      .def("mark", of_worker<std::uint64_t>(&Table::mark), "worker"_a.none(), "cursor"_a)
      .def("sweep", of_worker<>(&Table::sweep), "worker"_a.none())
      .def("evicted", of_worker<>(&Table::evicted), "worker"_a.none())
      .def(
          "content",
          [](const PyTable& table, nb::handle worker) -> nb::object {
            const std::optional<Content> content = of_worker<>(&Table::content)(table, worker);
            if (!content) return nb::none();
            return nb::make_tuple(content->digest, content->blocks);
          },
          "worker"_a.none())
      .def("held_by", of_worker<>(&Table::held_by), "worker"_a.none())
      .def("workers",
           [](const PyTable& table) { return without_gil([&] { return table.native().workers(); }); })
      .def("image", [](const PyTable& table) { return without_gil([&] { return table.native().image(); }); })
      .def("stats", &PyTable::stats);
  m.def(
      "table_of",
      [](nb::handle packed, std::size_t max_blocks, bool reuse_reports, std::uint32_t block_tokens,
         std::shared_ptr<MemoryBudget> budget) {
        const Bytes bytes(packed);
        return without_gil([&] {
          return new PyTable(max_blocks, reuse_reports, block_tokens, std::move(budget),
                             unpack_image(bytes.get()));
        });
      },
      "packed"_a.none(), "max_blocks"_a, "reuse_reports"_a, "block_tokens"_a, "budget"_a.none(),
      nb::rv_policy::take_ownership);

  nb::class_<RankState> states(m, "RankState");
  states.def(nb::init<>());
  def_field<&RankState::version>(states, "version");
  def_field<&RankState::sequence>(states, "sequence");
  def_field<&RankState::heard_at_ms>(states, "heard_at_ms");
  def_field<&RankState::stale>(states, "stale");
  def_field<&RankState::has_feed>(states, "has_feed");
  nb::class_<PyAnswer>(m, "Answer")
      .def("moved", [](const PyAnswer& answer) { return to_tuple(answer.native.moved); })
      .def("columns", &PyAnswer::columns)
      .def("most", &PyAnswer::most)
      .def("pack", [](const PyAnswer& answer) { return to_bytes(answer.rows->pack(answer.native)); });
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
      .def_rw("near_cost", &RankLoad::near_cost)
      .def_rw("speed", &RankLoad::speed)
      .def_rw("session_tokens", &RankLoad::session_tokens)
      .def_rw("capacity_tokens", &RankLoad::capacity_tokens)
      .def_rw("reserved_cost", &RankLoad::reserved_cost)
      .def("pick", &RankLoad::pick, "number"_a, "cost"_a)
      .def("place", &RankLoad::place, "now_s"_a, "tokens"_a);
  nb::class_<PyRanking>(m, "Ranking")
      .def(nb::init<const nb::list&, const PyRanking::Numbers&, std::optional<std::uint64_t>, double, double,
                    double, std::optional<std::size_t>, const std::optional<PyRanking::Session>&>(),
           "parts"_a, "costs"_a, "prompt_tokens"_a.none(), "now_s"_a, "keep_s"_a, "keep_failed_s"_a,
           "limit"_a.none(), "session"_a.none() = nb::none())
      .def("__len__", &PyRanking::size)
      .def("best", &PyRanking::best)
      .def("pack", &PyRanking::pack, "reservation"_a)
      .def("picks", &PyRanking::picks);
  m.def("read_lookup_request", &py_read_lookup_request, "packed"_a);
  m.def("json_size", &py_json_size, "text"_a);
  m.def("read_token_list", &py_token_list, "text"_a.none(), "most"_a);
}

}  // namespace kvpool
