// Lists and buffers of Python read into native integers.
#include "tokens.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "fast_sequence.h"

namespace kvpool {
namespace {

bool read_int(PyObject* object, std::uint64_t& out) {
  int overflow = 0;
  const long value = PyLong_AsLongAndOverflow(object, &overflow);
  if (overflow == 0 && value >= 0) {
    out = static_cast<std::uint64_t>(value);
    return true;
  }
  if (overflow == 0 && value == -1 && PyErr_Occurred()) return false;
  if (overflow > 0) {
    out = PyLong_AsUnsignedLongLong(object);
    if (!PyErr_Occurred()) return true;
    PyErr_Clear();
  }
  PyErr_SetString(PyExc_ValueError, "token ids must be from 0 to 2**64 - 1");
  return false;
}

// Not exactly an int: numpy's scalars and the like, but not bool, which CBOR writes differently.
bool read_index(PyObject* object, std::uint64_t& out) {
  if (PyBool_Check(object)) {
    PyErr_SetString(PyExc_TypeError, "token ids must be integers, not bool");
    return false;
  }
  PyObject* index = PyNumber_Index(object);
  if (index == nullptr) return false;
  const bool ok = read_int(index, out);
  Py_DECREF(index);
  return ok;
}

bool read_sequence(PyObject* sequence, std::vector<std::uint64_t>& token_ids) {
  const FastSequence items(sequence);
  token_ids.reserve(static_cast<std::size_t>(items.size()));
  for (Py_ssize_t i = 0; i < items.size(); ++i) {
    PyObject* item = items[i];
    if (item == nullptr) {  // __index__ of a foreign integer may run anything
      PyErr_SetString(PyExc_ValueError, "the list of token ids was changed while it was read");
      return false;
    }
    std::uint64_t token_id = 0;
    if (PyLong_CheckExact(item)) {
      if (!read_int(item, token_id)) return false;
    } else {
      Py_INCREF(item);
      const bool ok = read_index(item, token_id);
      Py_DECREF(item);
      if (!ok) return false;
    }
    token_ids.push_back(token_id);
  }
  return true;
}

template <typename Int>
bool copy_integers(const Py_buffer& view, std::vector<std::uint64_t>& token_ids) {
  const std::size_t count = static_cast<std::size_t>(view.len) / sizeof(Int);
  token_ids.resize(count);
  for (std::size_t i = 0; i < count; ++i) {
    Int value;
    std::memcpy(&value, static_cast<const char*>(view.buf) + i * sizeof value, sizeof value);
    if constexpr (std::is_signed_v<Int>) {
      if (value < 0) {
        PyErr_SetString(PyExc_ValueError, "token ids must be from 0 to 2**64 - 1");
        return false;
      }
    }
    token_ids[i] = static_cast<std::uint64_t>(value);
  }
  return true;
}

bool copy_buffer(const Py_buffer& view, std::vector<std::uint64_t>& token_ids) {
  if (view.ndim != 1) {
    PyErr_SetString(PyExc_ValueError, "token ids must have one dimension");
    return false;
  }
  std::string_view format = view.format == nullptr ? "B" : view.format;
  if (format.starts_with('@') || format.starts_with('=') || format.starts_with('<')) format.remove_prefix(1);
  const bool is_signed = format.size() == 1 && std::strchr("hilqn", format[0]) != nullptr;
  const bool is_unsigned = format.size() == 1 && std::strchr("HILQN", format[0]) != nullptr;
  if (is_signed || is_unsigned) {
    switch (view.itemsize) {
      case 2:
        return is_signed ? copy_integers<std::int16_t>(view, token_ids)
                         : copy_integers<std::uint16_t>(view, token_ids);
      case 4:
        return is_signed ? copy_integers<std::int32_t>(view, token_ids)
                         : copy_integers<std::uint32_t>(view, token_ids);
      case 8:
        return is_signed ? copy_integers<std::int64_t>(view, token_ids)
                         : copy_integers<std::uint64_t>(view, token_ids);
      default:
        break;
    }
  }
  PyErr_Format(
      PyExc_ValueError,
      "token ids must be integers of 16, 32 or 64 bits in native byte order, not format '%s'; cast packed "
      "bytes first: memoryview(data).cast('I')",
      view.format == nullptr ? "B" : view.format);
  return false;
}

}  // namespace

bool read_tokens(PyObject* object, std::vector<std::uint64_t>& token_ids) {
  if (PyList_CheckExact(object) || PyTuple_CheckExact(object)) return read_sequence(object, token_ids);
  if (PyObject_CheckBuffer(object)) {
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) return false;
    const bool ok = copy_buffer(view, token_ids);
    PyBuffer_Release(&view);
    return ok;
  }
  PyObject* sequence =
      PySequence_Fast(object, "token ids must be a sequence of integers or a buffer of them");
  if (sequence == nullptr) return false;
  const bool ok = read_sequence(sequence, token_ids);
  Py_DECREF(sequence);
  return ok;
}

bool PyExtras::read(PyObject* mapping) {
  if (!PyMapping_Check(mapping)) {
    PyErr_SetString(PyExc_TypeError, "extras must be a mapping of block index to bytes");
    return false;
  }
  items_ = PyMapping_Items(mapping);
  if (items_ == nullptr) return false;
  for (Py_ssize_t i = 0; i < PyList_Size(items_); ++i) {
    PyObject* item = PyList_GetItem(items_, i);
    if (!PyTuple_Check(item) || PyTuple_Size(item) != 2 || !PyLong_CheckExact(PyTuple_GetItem(item, 0)) ||
        !PyBytes_Check(PyTuple_GetItem(item, 1))) {
      PyErr_SetString(PyExc_TypeError, "extras must be a mapping of block index to bytes");
      return false;
    }
    std::uint64_t index = 0;
    if (!read_int(PyTuple_GetItem(item, 0), index)) {
      PyErr_SetString(PyExc_ValueError, "extras: a block index must not be negative");
      return false;
    }
    PyObject* extra = PyTuple_GetItem(item, 1);
    if (PyBytes_Size(extra) == 0) {
      PyErr_SetString(PyExc_ValueError, "extras: leave a block without extra keys out");
      return false;
    }
    extras_.emplace_back(
        index, std::string_view(PyBytes_AsString(extra), static_cast<std::size_t>(PyBytes_Size(extra))));
  }
  std::sort(extras_.begin(), extras_.end());
  return true;
}

}  // namespace kvpool
