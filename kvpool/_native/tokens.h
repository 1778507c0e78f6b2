// Token ids and extra keys from Python, copied so that they can be hashed without the GIL.
#pragma once

#include <Python.h>

#include <cstdint>
#include <vector>

#include "key/hashing.h"

namespace kvpool {

// A list, tuple or other sequence of ints, or a contiguous one-dimensional buffer of 16, 32 or 64 bit
// integers in native byte order. False: a Python exception is set.
bool read_tokens(PyObject* object, std::vector<std::uint64_t>& token_ids);

// The extra keys of blocks, by index, and the reference that keeps their bytes alive.
class PyExtras {
 public:
  PyExtras() = default;
  PyExtras(const PyExtras&) = delete;
  PyExtras& operator=(const PyExtras&) = delete;
  ~PyExtras() { Py_XDECREF(items_); }

  // False: a Python exception is set.
  bool read(PyObject* mapping);
  const Extras& extras() const { return extras_; }

 private:
  PyObject* items_ = nullptr;
  Extras extras_;
};

}  // namespace kvpool
