// Python bindings of the benchmark's bar: the plain loops of store/bare.h.

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.h"
#include "buffers.h"
#include "store/bare.h"

namespace kvpool {
namespace {

template <typename Loop>
void bare_move(Loop& loop, void (Loop::*move)(const std::vector<std::string>&, const BareBuffers&),
               const std::vector<std::string>& names, const nb::list& buffers, bool writable) {
  if (names.size() != buffers.size()) throw std::invalid_argument("as many names as buffers");
  PyBuffers held;
  BareBuffers spans;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (!held.add(buffers[i].ptr(), writable)) throw nb::python_error();
    spans.push_back(held[i]);
  }
  without_gil([&] { (loop.*move)(names, spans); });
}

template <typename Loop>
void bind_loop(nb::class_<Loop>& bound) {
  bound
      .def(
          "put",
          [](Loop& loop, const std::vector<std::string>& names, const nb::list& buffers) {
            bare_move(loop, &Loop::put, names, buffers, false);
          },
          "names"_a, "buffers"_a)
      .def(
          "get",
          [](Loop& loop, const std::vector<std::string>& names, const nb::list& buffers) {
            bare_move(loop, &Loop::get, names, buffers, true);
          },
          "names"_a, "buffers"_a);
}

}  // namespace

void bind_bare(nb::module_& m) {
  auto bare_server = nb::class_<BareServer>(m, "BareServer");
  bare_server.def(
      "__init__",
      [](BareServer* loop, const std::string& host, std::uint16_t port, const std::string& unix_path,
         const std::string& user, const std::string& password, unsigned database, unsigned connections) {
        without_gil(
            [&] { new (loop) BareServer({host, port, unix_path}, user, password, database, connections); });
      },
      "host"_a, "port"_a, "unix_path"_a, "user"_a, "password"_a, "database"_a, "connections"_a);
  bind_loop(bare_server);
  auto bare_files = nb::class_<BareFiles>(m, "BareFiles");
  bare_files.def(
      "__init__",
      [](BareFiles* loop, const std::string& folder, unsigned threads) {
        new (loop) BareFiles(folder, threads);
      },
      "folder"_a, "threads"_a);
  bind_loop(bare_files);
}

}  // namespace kvpool
