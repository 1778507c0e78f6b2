// How Python buffers are taken, released, and kept for batches that outlive their Python object.
#include "buffers.h"

#include <algorithm>
#include <iterator>

namespace kvpool {

bool PyBuffers::add(PyObject* object, bool writable) {
  Py_buffer view;
  if (PyObject_GetBuffer(object, &view,
                         writable ? PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE : PyBUF_C_CONTIGUOUS) != 0) {
    return false;
  }
  if (view.len == 0) {
    PyBuffer_Release(&view);
    PyErr_SetString(PyExc_ValueError, "a buffer is empty: a record has at least one byte");
    return false;
  }
  views_.push_back(view);
  return true;
}

void PyBuffers::release() {
  std::vector<Py_buffer> views = std::exchange(views_, {});
  for (Py_buffer& view : views) PyBuffer_Release(&view);
}

Orphans::~Orphans() {
  reap();
  for (auto& orphan : orphans_) orphan.second.leak();
}

void Orphans::adopt(std::shared_ptr<Batch> batch, PyBuffers buffers) {
  orphans_.emplace_back(std::move(batch), std::move(buffers));
}

void Orphans::reap() {
  if (orphans_.empty()) return;
  const auto done = std::partition(orphans_.begin(), orphans_.end(),
                                   [](const auto& orphan) { return !orphan.first->done(); });
  std::vector<std::pair<std::shared_ptr<Batch>, PyBuffers>> reaped(std::make_move_iterator(done),
                                                                   std::make_move_iterator(orphans_.end()));
  orphans_.erase(done, orphans_.end());
}

}  // namespace kvpool
