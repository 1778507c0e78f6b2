// The table of index/ as Python sees it.
#pragma once

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings.h"
#include "index/events.h"
#include "index/table.h"
#include "index/table_image.h"

namespace kvpool {

inline constexpr std::size_t kMaxPromptBlocks = std::size_t{1} << 22;

inline std::string_view utf8_view(nb::handle text, const char* what) {
  Py_ssize_t nbytes = 0;
  if (!PyUnicode_Check(text.ptr())) throw nb::type_error(what);
  const char* data = PyUnicode_AsUTF8AndSize(text.ptr(), &nbytes);
  if (data == nullptr) {
    PyErr_Clear();
    throw std::invalid_argument("a worker's name is not Unicode");
  }
  return {data, static_cast<std::size_t>(nbytes)};
}

inline nb::str to_str(std::string_view text) { return nb::str(text.data(), text.size()); }

inline nb::tuple to_tuple(const Applied& applied) {
  return nb::make_tuple(applied.stored, applied.copied, applied.repeated, applied.removed, applied.uncopied,
                        applied.unknown, applied.refused, applied.doubted, applied.cleared_events,
                        applied.skipped_events, applied.evicted, applied.lookahead_events);
}

inline nb::bytes packed(const std::vector<std::uint32_t>& column) {
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

inline nb::tuple to_tuple(const TierBlocks& blocks) {
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

inline std::shared_ptr<MemoryBudget> native_of(const PyMemoryBudget* budget) {
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

}  // namespace kvpool
