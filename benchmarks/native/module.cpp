// The Python module kvpool_bare; benchmarks/native/kvpool_bare.pyi says what it offers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "bare.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Names = std::vector<std::string>;

// The buffers of Python objects for the time of a call.
class Held {
 public:
  Held(const nb::list& objects, bool writable) {
    views_.reserve(objects.size());
    for (const nb::handle object : objects) {
      Py_buffer view;
      const int flags = writable ? PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE : PyBUF_C_CONTIGUOUS;
      if (PyObject_GetBuffer(object.ptr(), &view, flags) != 0) {
        release();
        throw nb::python_error();
      }
      views_.push_back(view);
      spans.emplace_back(static_cast<std::byte*>(view.buf), static_cast<std::size_t>(view.len));
    }
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() { release(); }

  bare::Buffers spans;

 private:
  void release() {
    for (Py_buffer& view : views_) PyBuffer_Release(&view);
  }

  std::vector<Py_buffer> views_;
};

template <typename Move>
void move(const Names& names, const nb::list& buffers, bool writable, Move move_spans) {
  if (names.size() != buffers.size()) throw std::invalid_argument("as many names as buffers");
  const Held held(buffers, writable);
  const nb::gil_scoped_release released;
  move_spans(held.spans);
}

}  // namespace

NB_MODULE(kvpool_bare, m) {
  m.def(
      "put_values",
      [](const std::vector<int>& connections, const Names& keys, const nb::list& buffers) {
        move(keys, buffers, false, [&](const auto& spans) { bare::put_values(connections, keys, spans); });
      },
      "connections"_a, "keys"_a, "buffers"_a);
  m.def(
      "get_values",
      [](const std::vector<int>& connections, const Names& keys, const nb::list& buffers) {
        move(keys, buffers, true, [&](const auto& spans) { bare::get_values(connections, keys, spans); });
      },
      "connections"_a, "keys"_a, "buffers"_a);
  m.def(
      "write_files",
      [](const Names& paths, const nb::list& buffers, unsigned threads, bool direct) {
        move(paths, buffers, false,
             [&](const auto& spans) { bare::write_files(paths, spans, threads, direct); });
      },
      "paths"_a, "buffers"_a, "threads"_a, "direct"_a);
  m.def(
      "read_files",
      [](const Names& paths, const nb::list& buffers, unsigned threads, bool direct) {
        move(paths, buffers, true,
             [&](const auto& spans) { bare::read_files(paths, spans, threads, direct); });
      },
      "paths"_a, "buffers"_a, "threads"_a, "direct"_a);
}
