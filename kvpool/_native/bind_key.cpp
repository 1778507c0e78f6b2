// Python bindings of key/: block hashes, checksums, records.

#include <nanobind/stl/string_view.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "bindings.h"
#include "fast_sequence.h"
#include "key/checksum.h"
#include "key/hashing.h"
#include "key/record.h"
#include "tokens.h"

namespace kvpool {
namespace {

std::vector<std::byte> chain(HashAlgorithm algorithm, const nb::bytes& parent, nb::handle token_ids,
                             Py_ssize_t block_tokens, nb::handle extras) {
  if (block_tokens < 1) throw std::invalid_argument("block_tokens must be at least 1");
  std::vector<std::uint64_t> tokens;
  if (!read_tokens(token_ids.ptr(), tokens)) throw nb::python_error();
  PyExtras by_block;
  if (!by_block.read(extras.ptr())) throw nb::python_error();
  return without_gil([&] {
    return hash_chain(algorithm, as_text(parent), tokens, static_cast<std::size_t>(block_tokens),
                      by_block.extras());
  });
}

nb::list py_hash_chain(std::string_view algorithm_name, const nb::bytes& parent, nb::handle token_ids,
                       Py_ssize_t block_tokens, nb::handle extras) {
  const HashAlgorithm algorithm = parse_algorithm(algorithm_name);
  const std::vector<std::byte> digests = chain(algorithm, parent, token_ids, block_tokens, extras);
  const std::size_t nbytes = digest_nbytes(algorithm);
  const std::size_t blocks = digests.size() / nbytes;
  nb::list hashes = nb::steal<nb::list>(PyList_New(static_cast<Py_ssize_t>(blocks)));
  if (!hashes.is_valid()) throw nb::python_error();
  for (std::size_t i = 0; i < blocks; ++i) {
    PyObject* hash = PyBytes_FromStringAndSize(reinterpret_cast<const char*>(digests.data() + i * nbytes),
                                               static_cast<Py_ssize_t>(nbytes));
    if (hash == nullptr) throw nb::python_error();
    if (PyList_SetItem(hashes.ptr(), static_cast<Py_ssize_t>(i), hash) != 0) throw nb::python_error();
  }
  return hashes;
}

nb::bytes py_hash_chain64(std::string_view algorithm_name, const nb::bytes& parent, nb::handle token_ids,
                          Py_ssize_t block_tokens, nb::handle extras) {
  const HashAlgorithm algorithm = parse_algorithm(algorithm_name);
  const auto words = low_words(algorithm, chain(algorithm, parent, token_ids, block_tokens, extras));
  return nb::bytes(words.data(), words.size() * sizeof(std::uint64_t));
}

// Hashes lie wherever the allocator put them: a join waits for memory twice for each, the prefetch hides most of it.
nb::bytes py_pack_hashes(nb::handle hashes) {
  constexpr Py_ssize_t kAhead = 16;
  constexpr std::size_t kBytesHeader =
      32;  // of a bytes object, before its bytes: only a guess of what to prefetch
  const nb::object items = nb::steal(PySequence_Fast(hashes.ptr(), "hashes are a sequence of bytes"));
  if (!items.is_valid()) throw nb::python_error();
  const FastSequence all(items.ptr());
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
  const std::string result = without_gil([&] { return digest(algorithm, bytes.get()); });
  return nb::bytes(result.data(), result.size());
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

nb::bytes py_pack_header(std::string_view key_text, nb::handle payload) {
  const Key key = parse_key(key_text);
  const Bytes bytes(payload);
  const RecordHeader header = without_gil([&] { return pack_header(key, bytes.get()); });
  return nb::bytes(&header, sizeof header);
}

nb::object py_verify_record(std::string_view key_text, nb::handle header, nb::handle payload) {
  const Key key = parse_key(key_text);
  const Bytes header_bytes(header);
  const Bytes payload_bytes(payload);
  const Damage damage =
      without_gil([&] { return verify_record(key, header_bytes.get(), payload_bytes.get()); });
  if (damage == Damage::kNone) return nb::none();
  const std::string_view name = damage_name(damage);
  return nb::str(name.data(), name.size());
}

}  // namespace

void bind_key(nb::module_& m) {
  m.attr("RECORD_HEADER_NBYTES") = kRecordHeaderNbytes;

  m.def("hash_chain", &py_hash_chain, "algorithm"_a, "parent"_a, "token_ids"_a, "block_tokens"_a, "extras"_a);
  m.def("hash_chain64", &py_hash_chain64, "algorithm"_a, "parent"_a, "token_ids"_a, "block_tokens"_a,
        "extras"_a);
  m.def("pack_hashes", &py_pack_hashes, "hashes"_a);
  m.def("digest", &py_digest, "algorithm"_a, "data"_a);
  m.def("checksum", &py_checksum, "data"_a);
  m.def("checksum_isa", &checksum_isa);
  m.def("pack_header", &py_pack_header, "key"_a, "payload"_a);
  m.def("verify_record", &py_verify_record, "key"_a, "header"_a, "payload"_a);
}

}  // namespace kvpool
