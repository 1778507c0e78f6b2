// Python bindings of index/: the table, its images, the answers of lookups.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "index/answer.h"
#include "index/events.h"
#include "index/lookup_request.h"
#include "index/table.h"
#include "index/table_image.h"

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

nb::str to_str(std::string_view text) { return nb::str(text.data(), text.size()); }

nb::tuple to_tuple(const Applied& applied) {
  return nb::make_tuple(applied.stored, applied.copied, applied.repeated, applied.removed, applied.uncopied,
                        applied.unknown, applied.refused, applied.doubted, applied.cleared_events,
                        applied.skipped_events, applied.evicted, applied.lookahead_events);
}

nb::bytes packed(const std::vector<std::uint32_t>& column) {
  return nb::bytes(column.data(), column.size() * sizeof(std::uint32_t));
}

class PyMatches {
 public:
  explicit PyMatches(Matches matches) : matches_(std::move(matches)) {}

  std::size_t rows() const { return matches_.workers.size(); }
  nb::list workers() const {
    nb::list names;
    for (const auto& name : matches_.workers) names.append(to_str(*name));
    return names;
  }
  nb::bytes dp_ranks() const { return packed(matches_.dp_ranks); }
  nb::bytes column(std::size_t column) const {
    if (column >= kColumnCount) throw std::invalid_argument("there is no such column");
    return packed(matches_.columns[column]);
  }

 private:
  Matches matches_;
};

class PyTableImage {
 public:
  explicit PyTableImage(TableImage image) : image_(std::move(image)) {}

  nb::bytes pack() const {
    const std::vector<std::byte> packed = without_gil([this] { return pack_image(image_); });
    return nb::bytes(packed.data(), packed.size());
  }

 private:
  TableImage image_;
};

nb::tuple to_tuple(const TierBlocks& blocks) {
  return nb::make_tuple(blocks[0], blocks[1], blocks[2], blocks[3]);
}

class PyMemoryBudget {
 public:
  explicit PyMemoryBudget(std::size_t limit_nbytes) : budget_(std::make_shared<MemoryBudget>(limit_nbytes)) {}
  std::shared_ptr<MemoryBudget> get() const { return budget_; }
  std::size_t used_nbytes() const { return budget_->used_nbytes; }

 private:
  std::shared_ptr<MemoryBudget> budget_;
};

std::shared_ptr<MemoryBudget> native_of(const PyMemoryBudget* budget) {
  return budget == nullptr ? nullptr : budget->get();
}

class PyTable {
 public:
  PyTable(std::size_t max_blocks, bool reuse_reports, std::uint32_t block_tokens,
          const PyMemoryBudget* budget)
      : PyTable(std::make_unique<Table>(max_blocks, reuse_reports, block_tokens, native_of(budget))) {}
  explicit PyTable(std::unique_ptr<Table> table) : table_(std::move(table)) {}
  PyTable(const PyTable&) = delete;
  PyTable& operator=(const PyTable&) = delete;
  ~PyTable() {
    without_gil([this] { table_.reset(); });
  }

  nb::tuple apply(nb::handle worker, nb::handle payload, std::uint32_t dp_rank, nb::handle pool) {
    const std::string_view name = utf8_view(worker, "worker must be a str");
    std::optional<std::string_view> pool_name;
    if (!pool.is_none()) pool_name = utf8_view(pool, "pool must be a str or None");
    const Bytes bytes(payload);
    try {
      return to_tuple(
          without_gil([&] { return table_->apply(name, dp_rank, decode_events(bytes.get()), pool_name); }));
    } catch (const MalformedEvents&) {
      ++malformed_batches_;  // under the GIL again
      throw;
    }
  }

  PyMatches match(nb::handle hashes64, nb::handle workers) const {
    std::vector<std::string_view> names;
    nb::object sequence;
    if (!workers.is_none()) {
      if (PyUnicode_Check(workers.ptr()))
        throw nb::type_error("workers must be a sequence of str, not one str");
      // A tuple of our own: the names must live for as long as the call.
      sequence = nb::steal(PySequence_Tuple(workers.ptr()));
      if (!sequence.is_valid()) throw nb::python_error();
      for (nb::handle worker : nb::borrow<nb::tuple>(sequence)) {
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
    return PyMatches(
        without_gil([&] { return table_->match(bytes.get(), workers.is_none() ? nullptr : &names); }));
  }

  const Table& native() const { return *table_; }

  bool remove_worker(nb::handle worker) {
    const std::string_view name = utf8_view(worker, "worker must be a str");
    return without_gil([&] { return table_->remove_worker(name); });
  }

  bool clear(nb::handle worker, std::optional<std::uint32_t> dp_rank, unsigned tiers) {
    const std::string_view name = utf8_view(worker, "worker must be a str");
    if (tiers > kAllTiers) throw std::invalid_argument("tiers has one bit for each of four tiers");
    return without_gil([&] { return table_->clear(name, dp_rank, static_cast<Tiers>(tiers)); });
  }

  std::uint64_t doubt(nb::handle worker, std::uint64_t cursor) {
    const std::string_view name = utf8_view(worker, "worker must be a str");
    return without_gil([&] { return table_->doubt(name, cursor); });
  }

  std::pair<std::size_t, std::size_t> expel(nb::handle worker) {
    const std::string_view name = utf8_view(worker, "worker must be a str");
    return without_gil([&] { return table_->expel(name); });
  }

  std::uint64_t evicted(nb::handle worker) const {
    const std::string_view name = utf8_view(worker, "worker must be a str");
    return without_gil([&] { return table_->evicted(name); });
  }

  nb::list workers() const {
    const std::vector<std::string> names = without_gil([this] { return table_->workers(); });
    nb::list list;
    for (const std::string& name : names) list.append(to_str(name));
    return list;
  }

  nb::tuple held_by(nb::handle worker) const {
    const std::string_view name = utf8_view(worker, "worker must be a str");
    return to_tuple(without_gil([&] { return table_->held_by(name); }));
  }

  nb::object content(nb::handle worker) const {
    const std::string_view name = utf8_view(worker, "worker must be a str");
    const std::optional<Content> content = without_gil([&] { return table_->content(name); });
    if (!content) return nb::none();
    return nb::make_tuple(content->digest, content->blocks);
  }

  PyTableImage image() const {
    return PyTableImage(without_gil([this] { return table_->image(); }));
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
    result["tier_blocks"] = to_tuple(stats.tier_blocks);
    return result;
  }

 private:
  std::unique_ptr<Table> table_;
  std::uint64_t malformed_batches_ = 0;
};

class PyAnswer {
 public:
  PyAnswer(std::shared_ptr<const Rows> rows, Answer answer)
      : rows_(std::move(rows)), answer_(std::move(answer)) {}

  Answer& native() { return answer_; }
  nb::tuple moved() const { return to_tuple(answer_.moved); }
  nb::tuple columns() const {
    return nb::make_tuple(to_tuple(std::vector(rows_->size(), answer_.prompt_blocks)),
                          to_tuple(answer_.device), to_tuple(answer_.local), to_tuple(answer_.pool),
                          to_tuple(answer_.sequences), to_tuple(answer_.staleness_ms),
                          to_tuple(std::vector<bool>(answer_.stale.begin(), answer_.stale.end())));
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

  PyAnswer answer(const PyTable& table, nb::handle hashes64, std::int64_t now_ms) const {
    const Bytes hashes(hashes64);
    return {rows_, without_gil([&] { return rows_->answer(table.native(), hashes.get(), now_ms); })};
  }
  void again(std::size_t row, const PyTable& table, nb::handle hashes64, std::int64_t now_ms,
             PyAnswer& answer) const {
    const Bytes hashes(hashes64);
    without_gil([&] { rows_->again(row, table.native(), hashes.get(), now_ms, answer.native()); });
  }

 private:
  nb::tuple kept_;  // the RankStates
  std::shared_ptr<const Rows> rows_;
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

PyTable* py_table_of(nb::handle packed, std::size_t max_blocks, bool reuse_reports,
                     std::uint32_t block_tokens, const PyMemoryBudget* budget) {
  const Bytes bytes(packed);
  return new PyTable(without_gil([&] {
    return std::make_unique<Table>(max_blocks, reuse_reports, block_tokens, native_of(budget),
                                   unpack_image(bytes.get()));
  }));
}

}  // namespace

void bind_index(nb::module_& m) {
  nb::exception<MalformedEvents>(m, "MalformedEvents", PyExc_ValueError);
  nb::class_<PyMatches>(m, "Matches")
      .def("__len__", &PyMatches::rows)
      .def("workers", &PyMatches::workers)
      .def("dp_ranks", &PyMatches::dp_ranks)
      .def("column", &PyMatches::column, "column"_a);
  nb::class_<PyMemoryBudget>(m, "MemoryBudget")
      .def(nb::init<std::size_t>(), "limit_nbytes"_a)
      .def_prop_ro("used_nbytes", &PyMemoryBudget::used_nbytes);
  // .none(): our own errors say more than nanobind's.
  nb::class_<PyTable>(m, "Table")
      .def(nb::init<std::size_t, bool, std::uint32_t, const PyMemoryBudget*>(), "max_blocks"_a,
           "reuse_reports"_a, "block_tokens"_a, "budget"_a.none())
      .def("apply", &PyTable::apply, "worker"_a.none(), "payload"_a.none(), "dp_rank"_a, "pool"_a.none())
      .def("match", &PyTable::match, "hashes64"_a.none(), "workers"_a.none())
      .def("remove_worker", &PyTable::remove_worker, "worker"_a.none())
      .def("clear", &PyTable::clear, "worker"_a.none(), "dp_rank"_a.none(), "tiers"_a)
      .def("doubt", &PyTable::doubt, "worker"_a.none(), "cursor"_a)
      .def("expel", &PyTable::expel, "worker"_a.none())
      .def("evicted", &PyTable::evicted, "worker"_a.none())
      .def("workers", &PyTable::workers)
      .def("content", &PyTable::content, "worker"_a.none())
      .def("image", &PyTable::image)
      .def("held_by", &PyTable::held_by, "worker"_a.none())
      .def("stats", &PyTable::stats);
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
          [](RankState& state, bool stale) { state.stale = stale; });
  nb::class_<PyAnswer>(m, "Answer")
      .def("moved", &PyAnswer::moved)
      .def("columns", &PyAnswer::columns)
      .def("most", &PyAnswer::most)
      .def("pack", &PyAnswer::pack);
  nb::class_<PyRows>(m, "Rows")
      .def(nb::init<const nb::tuple&, bool>(), "rows"_a, "are_all"_a)
      .def("answer", &PyRows::answer, "table"_a, "hashes64"_a, "now_ms"_a)
      .def("again", &PyRows::again, "row"_a, "table"_a, "hashes64"_a, "now_ms"_a, "answer"_a);
  m.def("read_lookup_request", &py_read_lookup_request, "packed"_a);
  nb::exception<DamagedImage>(m, "DamagedImage", PyExc_ValueError);
  nb::class_<PyTableImage>(m, "TableImage").def("pack", &PyTableImage::pack);
  m.def("table_of", &py_table_of, "packed"_a.none(), "max_blocks"_a, "reuse_reports"_a, "block_tokens"_a,
        "budget"_a.none(), nb::rv_policy::take_ownership);
}

}  // namespace kvpool
