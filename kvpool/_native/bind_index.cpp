// Python bindings of index/: the table and its images. What is answered from it: bind_answer.cpp.
#include <memory>

#include "bind_table.h"

namespace kvpool {
namespace {

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
  const nb::exception<MalformedEvents> malformed(m, "MalformedEvents", PyExc_ValueError);
  nb::exception<ClearedTooOften>(m, "ClearedTooOften", malformed.ptr());
  nb::exception<TooMuchWork>(m, "TooMuchWork", PyExc_RuntimeError);
  nb::exception<NotAtOnce>(m, "NotAtOnce", PyExc_RuntimeError);
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
  nb::exception<DamagedImage>(m, "DamagedImage", PyExc_ValueError);
  nb::class_<PyTableImage>(m, "TableImage").def("pack", &PyTableImage::pack);
  m.def("table_of", &py_table_of, "packed"_a.none(), "max_blocks"_a, "reuse_reports"_a, "block_tokens"_a,
        "budget"_a.none(), nb::rv_policy::take_ownership);
}

}  // namespace kvpool
