// What the binding files share.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <span>
#include <string_view>

namespace kvpool {

namespace nb = nanobind;
using namespace nb::literals;

// The bytes of one object, for the length of a call.
class Bytes {
 public:
  explicit Bytes(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_C_CONTIGUOUS) != 0) throw nb::python_error();
  }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  ~Bytes() { PyBuffer_Release(&view_); }
  std::span<const std::byte> get() const {
    return {static_cast<const std::byte*>(view_.buf), static_cast<std::size_t>(view_.len)};
  }

 private:
  Py_buffer view_;
};

inline std::string_view as_text(const nb::bytes& data) { return {data.c_str(), data.size()}; }

template <typename Body>
auto without_gil(Body body) {
  const nb::gil_scoped_release released;
  return body();
}

void bind_answer(nb::module_& m);
void bind_index(nb::module_& m);
void bind_key(nb::module_& m);
void bind_store(nb::module_& m);

}  // namespace kvpool
