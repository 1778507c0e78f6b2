// Buffers of Python objects, held for native threads.
#pragma once

#include <Python.h>

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "store/io_executor.h"

namespace kvpool {

// Py_buffers, each released exactly once. All of it needs the GIL.
class PyBuffers {
 public:
  PyBuffers() = default;
  PyBuffers(PyBuffers&& other) noexcept : views_(std::exchange(other.views_, {})) {}
  PyBuffers& operator=(PyBuffers&& other) noexcept {
    views_.swap(other.views_);
    return *this;
  }
  PyBuffers(const PyBuffers&) = delete;
  PyBuffers& operator=(const PyBuffers&) = delete;
  ~PyBuffers() { release(); }

  // False: a Python exception is set, and nothing was added.
  bool add(PyObject* object, bool writable);
  bool empty() const { return views_.empty(); }
  std::span<std::byte> operator[](std::size_t index) const {
    return {static_cast<std::byte*>(views_[index].buf), static_cast<std::size_t>(views_[index].len)};
  }
  // Exporters may run Python code here: the views are moved out first.
  void release();
  // For threads that may touch the memory for ever after.
  void leak() { new std::vector<Py_buffer>(std::move(views_)); }

 private:
  std::vector<Py_buffer> views_;
};

// The buffers of batches whose Python object is gone before its threads are done with them. Needs the GIL.
class Orphans {
 public:
  ~Orphans();
  void adopt(std::shared_ptr<Batch> batch, PyBuffers buffers);
  // Releases what is done. Called on every way into the executor.
  void reap();

 private:
  std::vector<std::pair<std::shared_ptr<Batch>, PyBuffers>> orphans_;
};

}  // namespace kvpool
