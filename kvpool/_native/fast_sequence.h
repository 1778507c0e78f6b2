// What PySequence_Fast returns, read with calls that the stable ABI has.
#pragma once

#include <Python.h>

namespace kvpool {

// A list or tuple, borrowed. Needs the GIL.
class FastSequence {
 public:
  explicit FastSequence(PyObject* sequence)
      : sequence_(sequence),
        get_(PyList_Check(sequence) ? &PyList_GetItem : &PyTuple_GetItem),
        size_(PyList_Check(sequence) ? PyList_Size(sequence) : PyTuple_Size(sequence)) {}

  // When this was made: a list may have changed since.
  Py_ssize_t size() const { return size_; }
  // Borrowed. Null, with IndexError set: the list has become shorter.
  PyObject* operator[](Py_ssize_t i) const { return get_(sequence_, i); }

 private:
  PyObject* sequence_;
  PyObject* (*get_)(PyObject*, Py_ssize_t);
  Py_ssize_t size_;
};

}  // namespace kvpool
