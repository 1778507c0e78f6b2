// Python bindings of key/: block hashes, checksums, records.

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings.h"
#include "key/checksum.h"
#include "key/distance.h"
#include "key/hash_cache.h"
#include "key/hashing.h"
#include "key/record.h"

namespace kvpool {
namespace {

constexpr const char* kTokenRange = "token ids must be from 0 to 2**64 - 1";

std::uint64_t read_int(PyObject* object) {
  int overflow = 0;
  const long value = PyLong_AsLongAndOverflow(object, &overflow);
  if (overflow == 0 && value >= 0) return static_cast<std::uint64_t>(value);
  if (overflow > 0) {
    const std::uint64_t wide = PyLong_AsUnsignedLongLong(object);
    if (!PyErr_Occurred()) return wide;
    PyErr_Clear();
  }
  throw std::invalid_argument(kTokenRange);
}

std::vector<std::uint64_t> read_sequence(const FastSequence& items) {
  std::vector<std::uint64_t> token_ids(static_cast<std::size_t>(items.size()));
  for (Py_ssize_t i = 0; i < items.size(); ++i) {
    PyObject* item = items[i];
    if (item == nullptr) {  // __index__ of a foreign integer may run anything
      PyErr_Clear();
      throw std::invalid_argument("the list of token ids was changed while it was read");
    }
    std::uint64_t& token_id = token_ids[static_cast<std::size_t>(i)];
    if (PyLong_CheckExact(item)) {
      token_id = read_int(item);
      continue;
    }
    // numpy's scalars and the like, but not bool, which CBOR writes differently.
    if (PyBool_Check(item)) throw nb::type_error("token ids must be integers, not bool");
    const nb::object held = nb::borrow(item);
    const nb::object index = nb::steal(PyNumber_Index(item));
    if (!index.is_valid()) throw nb::python_error();
    token_id = read_int(index.ptr());
  }
  return token_ids;
}

template <typename Int>
std::vector<std::uint64_t> read_integers(std::span<const std::byte> bytes) {
  std::vector<std::uint64_t> token_ids(bytes.size() / sizeof(Int));
  for (std::size_t i = 0; i < token_ids.size(); ++i) {
    Int value;
    std::memcpy(&value, bytes.data() + i * sizeof value, sizeof value);
    if constexpr (std::is_signed_v<Int>) {
      if (value < 0) throw std::invalid_argument(kTokenRange);
    }
    token_ids[i] = static_cast<std::uint64_t>(value);
  }
  return token_ids;
}

std::vector<std::uint64_t> read_buffer(const Bytes& bytes) {
  const Py_buffer& view = bytes.view();
  if (view.ndim != 1) throw std::invalid_argument("token ids must have one dimension");
  const std::string shown = view.format == nullptr ? "B" : view.format;
  std::string_view format = shown;
  if (format.starts_with('@') || format.starts_with('=') || format.starts_with('<')) format.remove_prefix(1);
  const bool is_signed = format.size() == 1 && std::strchr("hilqn", format[0]) != nullptr;
  const bool is_unsigned = format.size() == 1 && std::strchr("HILQN", format[0]) != nullptr;
  const auto data = bytes.get();
  if (is_signed || is_unsigned) {
    switch (view.itemsize) {
      case 2:
        return is_signed ? read_integers<std::int16_t>(data) : read_integers<std::uint16_t>(data);
      case 4:
        return is_signed ? read_integers<std::int32_t>(data) : read_integers<std::uint32_t>(data);
      case 8:
        return is_signed ? read_integers<std::int64_t>(data) : read_integers<std::uint64_t>(data);
      default:
        break;
    }
  }
  throw std::invalid_argument(
      "token ids must be integers of 16, 32 or 64 bits in native byte order, not format '" + shown +
      "'; cast packed bytes first: memoryview(data).cast('I')");
}

// A sequence of ints, or a contiguous one-dimensional buffer of 16, 32 or 64 bit integers in native byte order.
std::vector<std::uint64_t> read_tokens(nb::handle object) {
  if (!PyList_CheckExact(object.ptr()) && !PyTuple_CheckExact(object.ptr()) &&
      PyObject_CheckBuffer(object.ptr())) {
    return read_buffer(Bytes(object, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT));
  }
  return read_sequence({object, "token ids must be a sequence of integers or a buffer of them"});
}

// The tokens and extra keys of a prompt. `extras`: block index to its extra keys as CBOR.
struct Hashed {
  Hashed(nb::handle token_ids, const nb::dict& extras)
      : tokens(read_tokens(token_ids)), items(extras.items()) {
    for (const nb::handle item : items) {
      const auto [block, extra] = nb::cast<std::pair<std::uint64_t, nb::bytes>>(item);
      by_block.emplace_back(block, as_text(extra));
    }
    std::ranges::sort(by_block);
  }

  const std::vector<std::uint64_t> tokens;
  const nb::list items;  // keeps the bytes alive
  Extras by_block;
};

nb::list py_hash_chain(std::string_view algorithm_name, const nb::bytes& parent, nb::handle token_ids,
                       std::size_t block_tokens, const nb::dict& extras) {
  const HashAlgorithm algorithm = parse_algorithm(algorithm_name);
  const Hashed prompt(token_ids, extras);
  const std::vector<std::byte> digests = without_gil(
      [&] { return hash_chain(algorithm, as_text(parent), prompt.tokens, block_tokens, prompt.by_block); });
  const std::size_t nbytes = digest_nbytes(algorithm);
  const std::size_t blocks = digests.size() / nbytes;
  nb::list hashes = nb::steal<nb::list>(PyList_New(static_cast<Py_ssize_t>(blocks)));
  if (!hashes.is_valid()) throw nb::python_error();
  for (std::size_t i = 0; i < blocks; ++i) {
    nb::bytes hash(digests.data() + i * nbytes, nbytes);
    if (PyList_SetItem(hashes.ptr(), static_cast<Py_ssize_t>(i), hash.release().ptr()) != 0)
      throw nb::python_error();
  }
  return hashes;
}

nb::bytes py_hash_chain64(std::string_view algorithm_name, const nb::bytes& parent, nb::handle token_ids,
                          std::size_t block_tokens, const nb::dict& extras, HashCache* cache,
                          std::string_view owner) {
  const HashAlgorithm algorithm = parse_algorithm(algorithm_name);
  const Hashed prompt(token_ids, extras);
  const std::string_view first = as_text(parent);
  return to_bytes(without_gil([&] {
    if (cache != nullptr)
      return cache->hash_chain64(owner, algorithm, first, prompt.tokens, block_tokens, prompt.by_block);
    return low_words(algorithm, hash_chain(algorithm, first, prompt.tokens, block_tokens, prompt.by_block));
  }));
}

// Hashes lie wherever the allocator put them: a join waits for memory twice for each, the prefetch hides most of it.
nb::bytes py_pack_hashes(nb::handle hashes) {
  constexpr Py_ssize_t kAhead = 16;
  constexpr std::size_t kBytesHeader =
      32;  // of a bytes object, before its bytes: only a guess of what to prefetch
  const FastSequence all(hashes, "hashes are a sequence of bytes");
  const Py_ssize_t count = all.size();
  if (count == 0) return nb::bytes("", 0);
  if (!PyBytes_Check(all[0])) throw std::invalid_argument("hashes are bytes");
  const Py_ssize_t nbytes = PyBytes_Size(all[0]);
  nb::bytes packed = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, count * nbytes));
  if (!packed.is_valid()) throw nb::python_error();
  char* to = PyBytes_AsString(packed.ptr());
  PyObject* ahead[kAhead];  // those that are prefetched
  for (Py_ssize_t i = 0; i < count + kAhead; ++i) {
    PyObject*& slot = ahead[i % kAhead];
    if (i >= kAhead) {
      char* data = nullptr;
      Py_ssize_t size = 0;
      if (PyBytes_AsStringAndSize(slot, &data, &size) != 0) {
        PyErr_Clear();
        throw std::invalid_argument("hashes are bytes");
      }
      if (size != nbytes) throw std::invalid_argument("the hashes are of different lengths");
      std::memcpy(to, data, static_cast<std::size_t>(nbytes));
      to += nbytes;
    }
    if (i < count) {
      slot = all[i];
      const char* const later = reinterpret_cast<const char*>(slot);
      __builtin_prefetch(later);
      __builtin_prefetch(later + kBytesHeader + static_cast<std::size_t>(nbytes) - 1);
    }
  }
  return packed;
}

nb::bytes py_digest(std::string_view algorithm_name, nb::handle data) {
  const HashAlgorithm algorithm = parse_algorithm(algorithm_name);
  const Bytes bytes(data);
  return to_bytes(without_gil([&] { return digest(algorithm, bytes.get()); }));
}

std::uint64_t py_checksum(nb::handle data) {
  const Bytes bytes(data);
  const auto compute = [&] {
    Checksum checksum;
    checksum.update(bytes.get());
    return checksum.digest();
  };
  // 1 MiB takes some 50 us; getting the lock back takes longer where other threads want it.
  return bytes.get().size() < (std::size_t{1} << 20) ? compute() : without_gil(compute);
}

nb::bytes py_pack_header(std::string_view key_text, nb::handle payload, const nb::bytes& writer) {
  const Key key = parse_key(key_text);
  const Bytes bytes(payload);
  const Writer of_writer = read_writer(writer);
  const RecordHeader header = without_gil([&] { return pack_header(key, bytes.get(), of_writer); });
  return nb::bytes(&header, sizeof header);
}

nb::object py_verify_record(std::string_view key_text, nb::handle header, nb::handle payload) {
  const Key key = parse_key(key_text);
  const Bytes header_bytes(header);
  const Bytes payload_bytes(payload);
  const Damage damage =
      without_gil([&] { return verify_record(key, header_bytes.get(), payload_bytes.get()); });
  if (damage == Damage::kNone) return nb::none();
  return to_str(damage_name(damage));
}

// Of payloads that consist of pieces, which repeat: one pair of sums for each.
nb::list py_distances(nb::handle ours, nb::handle theirs,
                      const std::vector<std::pair<std::string, std::size_t>>& pieces) {
  constexpr const char* kUnfilled = "payloads of the same length that pieces fill, please";
  const Bytes one(ours);
  const Bytes other(theirs);
  std::vector<std::pair<Element, std::size_t>> read;
  std::size_t nbytes = 0;
  for (const auto& [name, size] : pieces) {
    const std::optional<Element> element = parse_element(name);
    if (!element) throw std::invalid_argument("no numbers are " + name);
    if (size % element_nbytes(*element) != 0)
      throw std::invalid_argument("a piece ends inside of an element");
    if (size > one.get().size() - nbytes) throw std::invalid_argument(kUnfilled);
    read.emplace_back(*element, size);
    nbytes += size;
  }
  if (nbytes == 0 || one.get().size() != other.get().size() || one.get().size() % nbytes != 0)
    throw std::invalid_argument(kUnfilled);
  const std::vector<Distance> sums = without_gil([&] {
    std::vector<Distance> found(read.size());
    for (std::size_t at = 0; at < one.get().size();) {
      for (std::size_t i = 0; i < read.size(); ++i) {
        const auto [element, size] = read[i];
        const Distance of_piece =
            distance(element, one.get().subspan(at, size), other.get().subspan(at, size));
        found[i].difference += of_piece.difference;
        found[i].norm += of_piece.norm;
        at += size;
      }
    }
    return found;
  });
  nb::list list;
  for (const Distance& of_piece : sums) list.append(nb::make_tuple(of_piece.difference, of_piece.norm));
  return list;
}

nb::list py_cut_record(std::uint64_t payload_nbytes) {
  const RecordFields fields = cut_record(payload_nbytes);
  nb::list list;
  for (std::size_t i = 0; i < fields.count; ++i) {
    list.append(nb::make_tuple(to_str(fields.name(i)), fields.nbytes[i]));
  }
  return list;
}

}  // namespace

void bind_key(nb::module_& m) {
  m.attr("RECORD_HEADER_NBYTES") = kRecordHeaderNbytes;
  m.attr("RECORD_VERSION") = kRecordVersion;

  m.def("hash_chain", &py_hash_chain, "algorithm"_a, "parent"_a, "token_ids"_a, "block_tokens"_a, "extras"_a);
  m.def("hash_chain64", &py_hash_chain64, "algorithm"_a, "parent"_a, "token_ids"_a, "block_tokens"_a,
        "extras"_a, "cache"_a.none() = nb::none(), "owner"_a = "");
  nb::class_<HashCache>(m, "HashCache")
      .def(nb::init<std::size_t>(), "max_nbytes"_a)
      .def_prop_ro("nbytes", &HashCache::nbytes);
  m.def("pack_hashes", &py_pack_hashes, "hashes"_a);
  m.def("digest", &py_digest, "algorithm"_a, "data"_a);
  m.def("checksum", &py_checksum, "data"_a);
  m.def("checksum_isa", &checksum_isa);
  m.def("cut_record", &py_cut_record, "payload_nbytes"_a);
  m.def("record_server_nbytes", &record_server_nbytes, "payload_nbytes"_a);
  m.def("distances", &py_distances, "ours"_a, "theirs"_a, "pieces"_a);
  m.def("pack_header", &py_pack_header, "key"_a, "payload"_a, "writer"_a = nb::bytes("", 0));
  m.def("verify_record", &py_verify_record, "key"_a, "header"_a, "payload"_a);
}

}  // namespace kvpool
