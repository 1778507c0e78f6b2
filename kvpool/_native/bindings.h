// What the binding files share. All of it needs the GIL, unless it says otherwise.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <utility>

#include "key/record.h"

namespace kvpool {

namespace nb = nanobind;
using namespace nb::literals;

// The bytes of an object, held as long as this lives.
class Bytes {
 public:
  explicit Bytes(nb::handle object, int flags = PyBUF_C_CONTIGUOUS) {
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nb::python_error();
  }
  Bytes(Bytes&& other) noexcept : view_(std::exchange(other.view_, Py_buffer{})) {}
  Bytes& operator=(Bytes&&) = delete;
  ~Bytes() { PyBuffer_Release(&view_); }
  // To be written only with PyBUF_WRITABLE.
  std::span<std::byte> get() const {
    return {static_cast<std::byte*>(view_.buf), static_cast<std::size_t>(view_.len)};
  }
  const Py_buffer& view() const { return view_; }

 private:
  Py_buffer view_;
};

// A list, a tuple, or another sequence copied into a list; read with calls that the stable ABI has.
class FastSequence {
 public:
  // `expected`: the error of anything else.
  FastSequence(nb::handle any, const char* expected)
      : sequence_(nb::steal(PySequence_Fast(any.ptr(), expected))) {
    if (!sequence_.is_valid()) throw nb::python_error();
    const bool is_list = PyList_Check(sequence_.ptr());
    get_ = is_list ? &PyList_GetItem : &PyTuple_GetItem;
    size_ = is_list ? PyList_Size(sequence_.ptr()) : PyTuple_Size(sequence_.ptr());
  }

  nb::handle get() const { return sequence_; }
  // When this was made: a list may have changed since.
  Py_ssize_t size() const { return size_; }
  // Borrowed. Null, with IndexError set: the list has become shorter.
  PyObject* operator[](Py_ssize_t i) const { return get_(sequence_.ptr(), i); }

 private:
  nb::object sequence_;
  PyObject* (*get_)(PyObject*, Py_ssize_t);
  Py_ssize_t size_;
};

inline std::string_view as_text(const nb::bytes& data) { return {data.c_str(), data.size()}; }
// Empty: not named.
inline Writer read_writer(const nb::bytes& data) {
  Writer writer{};
  if (data.size() != 0 && data.size() != writer.size())
    throw std::invalid_argument("a writer is 16 bytes, or none");
  std::memcpy(writer.data(), data.c_str(), data.size());
  return writer;
}
inline nb::str to_str(std::string_view text) { return nb::str(text.data(), text.size()); }
// Of a std::string, or a vector of numbers.
nb::bytes to_bytes(const auto& items) { return nb::bytes(items.data(), items.size() * sizeof *items.data()); }

// Of this process's interpreter: `ending` from the first of its last steps on, which `ender` takes.
struct InterpreterEnd {
  std::atomic<bool> ending{false};
  std::atomic<int> returning{0};  // threads that take the GIL back
  std::thread::id ender;
};
inline InterpreterEnd interpreter_end;

// No GIL as long as this lives. Before 3.14 Python ends a daemon thread that asks for the GIL of an ending
// interpreter by unwinding its C++ frames, which ends the process: such a thread rests here instead.
class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;
  ~ReleasedGil() {
    InterpreterEnd& end = interpreter_end;
    ++end.returning;
    if (end.ending && std::this_thread::get_id() != end.ender) {
      --end.returning;
      for (;;) pause();
    }
    PyEval_RestoreThread(state_);
    --end.returning;
  }

 private:
  PyThreadState* state_;
};

template <typename Body>
auto without_gil(Body body) {
  const ReleasedGil released;
  return body();
}

void bind_index(nb::module_& m);
void bind_key(nb::module_& m);
void bind_replies(nb::module_& m);
void bind_store(nb::module_& m);

}  // namespace kvpool
