// Python bindings, and nothing else.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "bare.h"
#include "buffers.h"
#include "checksum.h"
#include "engine.h"
#include "events.h"
#include "file.h"
#include "hashing.h"
#include "lookup.h"
#include "record.h"
#include "resp.h"
#include "table.h"
#include "table_image.h"
#include "tls.h"
#include "tokens.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool {
namespace {

constexpr double kMaxTimeout_s = 3600.0;
constexpr unsigned kMaxThreads = 256;
constexpr double kMaxTtl_s = 10 * 366 * 86400.0;

Clock::duration to_duration(double timeout_s, bool may_be_zero) {
  if (!std::isfinite(timeout_s) || timeout_s > kMaxTimeout_s || timeout_s < 0 ||
      (timeout_s == 0 && !may_be_zero)) {
    throw std::invalid_argument("timeout_s must be finite, above 0 and at most 3600");
  }
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));
}

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

std::string_view as_text(const nb::bytes& data) { return {data.c_str(), data.size()}; }

template <typename Body>
auto without_gil(Body body) {
  const nb::gil_scoped_release released;
  return body();
}

// ---- hashing, records

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
    PyList_SET_ITEM(hashes.ptr(), static_cast<Py_ssize_t>(i), hash);
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
  const nb::object items = nb::steal(PySequence_Fast(hashes.ptr(), "hashes are a sequence of bytes"));
  if (!items.is_valid()) throw nb::python_error();
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(items.ptr());
  PyObject* const* const all = PySequence_Fast_ITEMS(items.ptr());
  if (count != 0 && !PyBytes_Check(all[0])) throw std::invalid_argument("hashes are bytes");
  const Py_ssize_t nbytes = count == 0 ? 0 : PyBytes_GET_SIZE(all[0]);
  nb::bytes packed = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, count * nbytes));
  if (!packed.is_valid()) throw nb::python_error();
  char* to = PyBytes_AS_STRING(packed.ptr());
  for (Py_ssize_t i = 0; i < count; ++i, to += nbytes) {
    if (i + kAhead < count) {
      const char* const later = reinterpret_cast<const char*>(all[i + kAhead]);
      __builtin_prefetch(later);
      __builtin_prefetch(later + sizeof(PyBytesObject) + static_cast<std::size_t>(nbytes) - 1);
    }
    if (!PyBytes_Check(all[i])) throw std::invalid_argument("hashes are bytes");
    if (PyBytes_GET_SIZE(all[i]) != nbytes)
      throw std::invalid_argument("the hashes are of different lengths");
    std::memcpy(to, PyBytes_AS_STRING(all[i]), static_cast<std::size_t>(nbytes));
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

// ---- engine

// The Python side of a batch. Its members are touched under the GIL only.
class PyBatch {
 public:
  PyBatch(std::shared_ptr<Batch> batch, PyBuffers buffers, std::shared_ptr<Orphans> orphans)
      : batch_(std::move(batch)), buffers_(std::move(buffers)), orphans_(std::move(orphans)) {}
  PyBatch(PyBatch&&) = default;
  PyBatch& operator=(PyBatch&&) = delete;
  ~PyBatch() {
    // A dropped batch goes on; its buffers wait with the orphans.
    if (batch_ && !batch_->done() && !buffers_.empty())
      orphans_->adopt(std::move(batch_), std::move(buffers_));
  }

  bool done() {
    orphans_->reap();
    const bool is_done = batch_->done();
    if (is_done) buffers_.release();
    return is_done;
  }

  bool wait(double timeout_s) {
    const Clock::time_point until = Clock::now() + to_duration(timeout_s, true);
    const std::shared_ptr<Batch> batch = batch_;
    for (;;) {
      // In slices, so that Ctrl-C gets through.
      const Clock::time_point slice = std::min(until, Clock::now() + std::chrono::milliseconds(100));
      if (without_gil([&] { return batch->wait_until(slice); })) return done();
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
      if (Clock::now() >= until) return done();
    }
  }

  void cancel() {
    without_gil([batch = batch_] { batch->cancel(); });
    done();
  }

  nb::bytes results() {
    require_done();
    const auto results = batch_->results();
    return nb::bytes(results.data(), results.size());
  }

  nb::object error() {
    require_done();
    const auto error = batch_->error();
    if (!error) return nb::none();
    // A path is bytes: what is not UTF-8 in it is shown escaped.
    return nb::steal(
        PyUnicode_DecodeUTF8(error->data(), static_cast<Py_ssize_t>(error->size()), "backslashreplace"));
  }

 private:
  void require_done() {
    if (!done()) throw std::runtime_error("the batch is not done: wait() first");
  }

  std::shared_ptr<Batch> batch_;
  PyBuffers buffers_;
  std::shared_ptr<Orphans> orphans_;
};

std::vector<Key> read_keys(nb::handle keys) {
  if (PyUnicode_Check(keys.ptr())) throw nb::type_error("keys must be a sequence of str, not one str");
  nb::object sequence = nb::steal(PySequence_Fast(keys.ptr(), "keys must be a sequence of str"));
  if (!sequence.is_valid()) throw nb::python_error();
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(sequence.ptr());
  std::vector<Key> parsed;
  parsed.reserve(static_cast<std::size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PySequence_Fast_GET_ITEM(sequence.ptr(), i);
    if (!PyUnicode_Check(item)) throw nb::type_error("keys must be a sequence of str");
    Py_ssize_t nbytes = 0;
    const char* text = PyUnicode_AsUTF8AndSize(item, &nbytes);
    if (text == nullptr) {
      PyErr_Clear();
      throw std::invalid_argument("a key is not printable ASCII");
    }
    parsed.push_back(parse_key({text, static_cast<std::size_t>(nbytes)}));
  }
  return parsed;
}

class PyEngine {
 public:
  explicit PyEngine(std::unique_ptr<Engine> engine)
      : engine_(std::move(engine)), orphans_(std::make_shared<Orphans>()) {}
  PyEngine(PyEngine&&) = default;
  PyEngine& operator=(PyEngine&&) = delete;
  ~PyEngine() {
    if (!engine_) return;
    without_gil([this] { engine_.reset(); });
    orphans_->reap();
  }

  PyBatch submit(int op_number, nb::handle keys, nb::handle buffers, double timeout_s) {
    orphans_->reap();
    if (op_number < 0 || op_number >= static_cast<int>(kOpCount)) {
      throw std::invalid_argument("op must be PUT, GET, CONTAINS, DELETE, TOUCH or PUT_ABSENT");
    }
    const auto op = static_cast<Op>(op_number);
    const Clock::duration timeout = to_duration(timeout_s, false);
    std::vector<Key> parsed = read_keys(keys);

    if (moves_bytes(op) == buffers.is_none()) {
      throw std::invalid_argument(moves_bytes(op) ? "PUT, GET and PUT_ABSENT need buffers"
                                                  : "CONTAINS, DELETE and TOUCH take no buffers");
    }
    PyBuffers held;
    std::vector<Batch::Buffer> spans;
    if (moves_bytes(op)) {
      nb::object sequence =
          nb::steal(PySequence_Fast(buffers.ptr(), "buffers must be a sequence of buffers"));
      if (!sequence.is_valid()) throw nb::python_error();
      // A tuple of our own: an exporter may run Python code that changes the list.
      nb::object fixed = nb::steal(PySequence_Tuple(sequence.ptr()));
      if (!fixed.is_valid()) throw nb::python_error();
      const auto count = static_cast<std::size_t>(PyTuple_GET_SIZE(fixed.ptr()));
      if (count != parsed.size()) {
        throw std::invalid_argument(std::to_string(parsed.size()) + " keys, but " + std::to_string(count) +
                                    " buffers");
      }
      spans.reserve(count);
      for (std::size_t i = 0; i < count; ++i) {
        if (!held.add(PyTuple_GET_ITEM(fixed.ptr(), static_cast<Py_ssize_t>(i)), op == Op::kGet)) {
          throw nb::python_error();
        }
        spans.push_back(held[i]);
      }
    }
    std::shared_ptr<Batch> batch = engine_->submit(op, std::move(parsed), std::move(spans), timeout);
    return PyBatch(std::move(batch), std::move(held), orphans_);
  }

  PyBatch lookup(std::string_view prefix, nb::handle groups, double timeout_s) {
    orphans_->reap();
    const Clock::duration timeout = to_duration(timeout_s, false);
    std::vector<LookupGroup> read;
    PyBuffers held;
    for (const nb::handle one : groups) {
      const auto [hashes, hash_nbytes, group, ranks, record_tokens, windowed] =
          nb::cast<std::tuple<nb::bytes, std::size_t, std::uint16_t, std::uint32_t, std::uint64_t, bool>>(
              one);
      if (hashes.size() != 0 && !held.add(hashes.ptr(), false)) throw nb::python_error();
      read.push_back({as_text(hashes), hash_nbytes, group, ranks, record_tokens, windowed});
    }
    std::shared_ptr<Batch> batch = engine_->submit(std::make_unique<Lookup>(prefix, read), timeout);
    return PyBatch(std::move(batch), std::move(held), orphans_);
  }

  nb::dict counters() {
    orphans_->reap();
    const Counters counters = without_gil([this] { return engine_->counters(); });
    nb::dict result;
    for (const auto& [name, value] : counters) result[nb::str(name.data(), name.size())] = value;
    return result;
  }

  bool close(double timeout_s) {
    const Clock::duration timeout = to_duration(timeout_s, true);
    const bool closed = without_gil([&] { return engine_->close(timeout); });
    orphans_->reap();
    return closed;
  }

 private:
  std::unique_ptr<Engine> engine_;
  std::shared_ptr<Orphans> orphans_;
};

// Calls open(); the system's errors become OSError with the path that they are about.
template <typename Open>
auto with_os_errors(const std::string& root, Open open) {
  if (root.empty() || root.find('\0') != std::string::npos)
    throw std::invalid_argument("root must be a path");
  try {
    return without_gil(open);
  } catch (const std::filesystem::filesystem_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrnoWithFilename(PyExc_OSError, error.path1().c_str());
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
  }
  throw nb::python_error();
}

PyEngine make_file_engine(const std::string& root, std::uint64_t capacity_nbytes, unsigned threads,
                          FileBackend::Open how) {
  if (capacity_nbytes == 0) throw std::invalid_argument("capacity_nbytes must be at least 1");
  if (threads < 1 || threads > kMaxThreads) throw std::invalid_argument("threads must be from 1 to 256");
  return PyEngine(with_os_errors(root, [&] {
    return std::make_unique<Engine>(std::make_unique<FileBackend>(root, capacity_nbytes, how), threads);
  }));
}

PyEngine open_file_engine(const std::string& root, std::uint64_t capacity_nbytes, unsigned threads) {
  return make_file_engine(root, capacity_nbytes, threads, FileBackend::Open::kMake);
}

// Of a pool that is there, with one thread: nothing is evicted to a capacity.
PyEngine find_file_engine(const std::string& root) {
  return make_file_engine(root, std::numeric_limits<std::uint64_t>::max(), 1, FileBackend::Open::kFind);
}

void make_file_pool(const std::string& root) {
  with_os_errors(root, [&] { return make_pool(root).inode; });
}

using PyTlsFiles = std::tuple<std::string, std::string, std::string>;

TlsFiles to_tls_files(const PyTlsFiles& files) {
  const auto& [ca, cert, key] = files;
  if (cert.empty() != key.empty()) throw std::invalid_argument("cert and key go together");
  for (const std::string* path : {&ca, &cert, &key}) {
    if (path->find('\0') != std::string::npos) throw std::invalid_argument("no path may hold a zero byte");
  }
  return {ca, cert, key};
}

RespSettings resp_settings(const std::string& user, const std::string& password, int database, double ttl_s,
                           unsigned connections, const std::optional<PyTlsFiles>& tls,
                           const std::string& client, const std::string& version) {
  for (const std::string* text : {&user, &password, &client, &version}) {
    if (text->find('\0') != std::string::npos) throw std::invalid_argument("no setting may hold a zero byte");
  }
  if (password.empty() && !user.empty()) throw std::invalid_argument("a user needs a password");
  if (database < 0) throw std::invalid_argument("database must be at least 0");
  if (!(ttl_s >= 0.001 && ttl_s <= kMaxTtl_s)) throw std::invalid_argument("ttl_s must be 0.001 to 10 years");
  if (connections < 1 || connections > kMaxThreads)
    throw std::invalid_argument("connections must be from 1 to 256");
  RespSettings settings;
  settings.user = user;
  settings.password = password;
  settings.database = static_cast<unsigned>(database);
  settings.client = client;
  settings.version = version;
  settings.ttl = std::chrono::milliseconds(static_cast<std::int64_t>(ttl_s * 1e3));
  if (tls) settings.tls = without_gil([&] { return std::make_shared<TlsContext>(to_tls_files(*tls)); });
  return settings;
}

PyEngine open_resp_engine(const std::string& host, int port, const std::string& unix_path,
                          const std::string& user, const std::string& password, int database, double ttl_s,
                          unsigned connections, const std::optional<PyTlsFiles>& tls,
                          const std::string& client, const std::string& version) {
  RespSettings settings = resp_settings(user, password, database, ttl_s, connections, tls, client, version);
  if (unix_path.empty() == host.empty()) throw std::invalid_argument("give a host or a unix_path");
  for (const std::string* text : {&host, &unix_path}) {
    if (text->find('\0') != std::string::npos) throw std::invalid_argument("no setting may hold a zero byte");
  }
  if (!host.empty() && (port < 1 || port > 65535))
    throw std::invalid_argument("port must be from 1 to 65535");
  settings.endpoint = {host, static_cast<std::uint16_t>(port), unix_path};
  try {
    return PyEngine(without_gil([&] {
      return std::make_unique<Engine>(std::make_unique<RespBackend>(std::move(settings)), connections);
    }));
  } catch (const Unreachable& error) {
    nb::object raised = nb::borrow(PyExc_OSError)(error.error_number(), error.what());
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
  }
  throw nb::python_error();
}

// ---- the benchmark's bar

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
void bind_bare(nb::class_<Loop>& bound) {
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

class PyTopology {
 public:
  explicit PyTopology(std::shared_ptr<Topology> topology) : topology_(std::move(topology)) {}

  void install(
      const std::vector<std::tuple<std::string, unsigned, std::vector<std::pair<unsigned, unsigned>>>>&
          nodes) {
    std::vector<NodeSlots> slots;
    for (const auto& [host, port, ranges] : nodes) slots.push_back({host, port, ranges});
    without_gil([&] { topology_->install(slots); });
  }
  bool wait_for_doubt(double timeout_s) {
    const Clock::time_point until = Clock::now() + to_duration(timeout_s, true);
    return without_gil([&] { return topology_->wait_for_doubt(until); });
  }
  void close() { topology_->close(); }
  bool closed() const { return topology_->closed(); }

 private:
  std::shared_ptr<Topology> topology_;
};

nb::tuple open_routed_resp_engine(const std::string& user, const std::string& password, int database,
                                  double ttl_s, unsigned connections, const std::optional<PyTlsFiles>& tls,
                                  const std::string& client, const std::string& version) {
  auto topology = std::make_shared<Topology>(
      resp_settings(user, password, database, ttl_s, connections, tls, client, version));
  try {
    PyEngine engine(without_gil(
        [&] { return std::make_unique<Engine>(std::make_unique<RespBackend>(topology), connections); }));
    return nb::make_tuple(std::move(engine), PyTopology(topology));
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
  }
  throw nb::python_error();
}

// ---- index

constexpr std::size_t kMaxPromptBlocks = std::size_t{1} << 22;

std::string_view utf8_view(nb::handle text, const char* what) {
  Py_ssize_t nbytes = 0;
  if (!PyUnicode_Check(text.ptr())) throw nb::type_error(what);
  const char* data = PyUnicode_AsUTF8AndSize(text.ptr(), &nbytes);
  if (data == nullptr) {
    PyErr_Clear();
    throw std::invalid_argument("a worker's name is not Unicode");
  }
  return {data, static_cast<std::size_t>(nbytes)};
}

nb::str to_str(std::string_view text) { return nb::str(text.data(), text.size()); }

nb::tuple to_tuple(const Applied& applied) {
  return nb::make_tuple(applied.stored, applied.copied, applied.repeated, applied.removed, applied.uncopied,
                        applied.unknown, applied.refused, applied.doubted, applied.cleared_events,
                        applied.skipped_events, applied.evicted);
}

nb::bytes packed(const std::vector<std::uint32_t>& column) {
  return nb::bytes(column.data(), column.size() * sizeof(std::uint32_t));
}

// Protobuf's packed varints of a column of an answer: protobuf's own takes a call for each number.
nb::bytes pack_varints(const nb::tuple& values) {
  std::vector<std::uint8_t> packed;
  for (const nb::handle value : values) {
    auto left = nb::cast<std::uint64_t>(value);
    for (; left >= 0x80; left >>= 7) packed.push_back(static_cast<std::uint8_t>(left | 0x80));
    packed.push_back(static_cast<std::uint8_t>(left));
  }
  return nb::bytes(packed.data(), packed.size());
}

class PyMatches {
 public:
  explicit PyMatches(Matches matches) : matches_(std::move(matches)) {}

  std::size_t rows() const { return matches_.workers.size(); }
  nb::list workers() const {
    nb::list names;
    for (const auto& name : matches_.workers) names.append(to_str(*name));
    return names;
  }
  nb::bytes dp_ranks() const { return packed(matches_.dp_ranks); }
  nb::bytes column(std::size_t column) const {
    if (column >= kColumnCount) throw std::invalid_argument("there is no such column");
    return packed(matches_.columns[column]);
  }

  // Columns in the order of somebody's own rows: of `count` rows, those that `places` names for a worker get what it
  // has, and the others 0. Of several rows of one worker the least counts.
  nb::list placed(const nb::dict& places, std::size_t count, const std::vector<std::size_t>& columns) const {
    std::vector<std::vector<std::uint32_t>> found(columns.size(), std::vector<std::uint32_t>(count));
    std::vector<bool> taken(count);
    for (std::size_t row = 0; row < rows(); ++row) {
      const nb::str name = to_str(*matches_.workers[row]);
      const nb::handle theirs = PyDict_GetItemWithError(places.ptr(), name.ptr());
      if (!theirs.is_valid()) {
        if (PyErr_Occurred() != nullptr) throw nb::python_error();
        continue;
      }
      if (!PyTuple_Check(theirs.ptr())) throw nb::type_error("places are tuples");
      for (const nb::handle one : nb::borrow<nb::tuple>(theirs)) {
        const auto place = nb::cast<std::size_t>(one);
        if (place >= count) throw std::invalid_argument("a place is beyond the last row");
        for (std::size_t i = 0; i < columns.size(); ++i) {
          const std::uint32_t blocks = matches_.columns.at(columns[i])[row];
          found[i][place] = taken[place] ? std::min(found[i][place], blocks) : blocks;
        }
        taken[place] = true;
      }
    }
    nb::list result;
    for (const auto& column : found) {
      nb::list numbers;
      for (const std::uint32_t blocks : column) numbers.append(blocks);
      result.append(numbers);
    }
    return result;
  }

 private:
  Matches matches_;
};

class PyTableImage {
 public:
  explicit PyTableImage(TableImage image) : image_(std::move(image)) {}

  nb::bytes pack() const {
    const std::vector<std::byte> packed = without_gil([this] { return pack_image(image_); });
    return nb::bytes(packed.data(), packed.size());
  }

 private:
  TableImage image_;
};

nb::tuple to_tuple(const TierBlocks& blocks) {
  return nb::make_tuple(blocks[0], blocks[1], blocks[2], blocks[3]);
}

class PyMemoryBudget {
 public:
  explicit PyMemoryBudget(std::size_t limit_nbytes) : budget_(std::make_shared<MemoryBudget>(limit_nbytes)) {}
  std::shared_ptr<MemoryBudget> get() const { return budget_; }
  std::size_t used_nbytes() const { return budget_->used_nbytes; }

 private:
  std::shared_ptr<MemoryBudget> budget_;
};

std::shared_ptr<MemoryBudget> native_of(const PyMemoryBudget* budget) {
  return budget == nullptr ? nullptr : budget->get();
}

class PyTable {
 public:
  PyTable(std::size_t max_blocks, bool reuse_reports, std::uint32_t block_tokens,
          const PyMemoryBudget* budget)
      : PyTable(std::make_unique<Table>(max_blocks, reuse_reports, block_tokens, native_of(budget))) {}
  explicit PyTable(std::unique_ptr<Table> table) : table_(std::move(table)) {}
  PyTable(const PyTable&) = delete;
  PyTable& operator=(const PyTable&) = delete;
  ~PyTable() {
    without_gil([this] { table_.reset(); });
  }

  nb::tuple apply(nb::handle worker, nb::handle payload, std::uint32_t dp_rank, nb::handle pool) {
    const std::string_view name = utf8_view(worker, "worker must be a str");
    std::optional<std::string_view> pool_name;
    if (!pool.is_none()) pool_name = utf8_view(pool, "pool must be a str or None");
    const Bytes bytes(payload);
    try {
      return to_tuple(
          without_gil([&] { return table_->apply(name, dp_rank, decode_events(bytes.get()), pool_name); }));
    } catch (const MalformedEvents&) {
      ++malformed_batches_;  // under the GIL again
      throw;
    }
  }

  PyMatches match(nb::handle hashes64, nb::handle workers) const {
    std::vector<std::string_view> names;
    nb::object sequence;
    if (!workers.is_none()) {
      if (PyUnicode_Check(workers.ptr()))
        throw nb::type_error("workers must be a sequence of str, not one str");
      // A tuple of our own: the names must live for as long as the call.
      sequence = nb::steal(PySequence_Tuple(workers.ptr()));
      if (!sequence.is_valid()) throw nb::python_error();
      for (nb::handle worker : nb::borrow<nb::tuple>(sequence)) {
        names.push_back(utf8_view(worker, "workers must be a sequence of str"));
      }
    }
    const Bytes bytes(hashes64);
    if (bytes.get().size() % sizeof(std::uint64_t) != 0) {
      throw std::invalid_argument("hashes64 is packed 64-bit integers: its length is a multiple of 8");
    }
    if (bytes.get().size() / sizeof(std::uint64_t) > kMaxPromptBlocks) {
      throw std::invalid_argument("a prompt has at most 4194304 blocks");
    }
    return PyMatches(
        without_gil([&] { return table_->match(bytes.get(), workers.is_none() ? nullptr : &names); }));
  }

  bool remove_worker(nb::handle worker) {
    const std::string_view name = utf8_view(worker, "worker must be a str");
    return without_gil([&] { return table_->remove_worker(name); });
  }

  bool clear(nb::handle worker, std::optional<std::uint32_t> dp_rank, unsigned tiers) {
    const std::string_view name = utf8_view(worker, "worker must be a str");
    if (tiers > kAllTiers) throw std::invalid_argument("tiers has one bit for each of four tiers");
    return without_gil([&] { return table_->clear(name, dp_rank, static_cast<Tiers>(tiers)); });
  }

  std::uint64_t doubt(nb::handle worker, std::uint64_t cursor) {
    const std::string_view name = utf8_view(worker, "worker must be a str");
    return without_gil([&] { return table_->doubt(name, cursor); });
  }

  std::pair<std::size_t, std::size_t> expel(nb::handle worker) {
    const std::string_view name = utf8_view(worker, "worker must be a str");
    return without_gil([&] { return table_->expel(name); });
  }

  std::uint64_t evicted(nb::handle worker) const {
    const std::string_view name = utf8_view(worker, "worker must be a str");
    return without_gil([&] { return table_->evicted(name); });
  }

  nb::list workers() const {
    const std::vector<std::string> names = without_gil([this] { return table_->workers(); });
    nb::list list;
    for (const std::string& name : names) list.append(to_str(name));
    return list;
  }

  nb::tuple held_by(nb::handle worker) const {
    const std::string_view name = utf8_view(worker, "worker must be a str");
    return to_tuple(without_gil([&] { return table_->held_by(name); }));
  }

  nb::object content(nb::handle worker) const {
    const std::string_view name = utf8_view(worker, "worker must be a str");
    const std::optional<Content> content = without_gil([&] { return table_->content(name); });
    if (!content) return nb::none();
    return nb::make_tuple(content->digest, content->blocks);
  }

  PyTableImage image() const {
    return PyTableImage(without_gil([this] { return table_->image(); }));
  }

  nb::dict stats() const {
    const TableStats stats = without_gil([this] { return table_->stats(); });
    nb::dict result;
    result["applied"] = to_tuple(stats.applied);
    result["batches"] = stats.batches;
    result["malformed_batches"] = malformed_batches_;
    result["blocks"] = stats.blocks;
    result["holder_sets"] = stats.holder_sets;
    result["workers"] = stats.workers;
    result["holders"] = stats.holders;
    result["copies"] = stats.copies;
    result["unswept"] = stats.unswept;
    result["nbytes"] = stats.nbytes;
    result["tier_blocks"] = to_tuple(stats.tier_blocks);
    return result;
  }

 private:
  std::unique_ptr<Table> table_;
  std::uint64_t malformed_batches_ = 0;
};

PyTable* py_table_of(nb::handle packed, std::size_t max_blocks, bool reuse_reports,
                     std::uint32_t block_tokens, const PyMemoryBudget* budget) {
  const Bytes bytes(packed);
  return new PyTable(without_gil([&] {
    return std::make_unique<Table>(max_blocks, reuse_reports, block_tokens, native_of(budget),
                                   unpack_image(bytes.get()));
  }));
}

}  // namespace
}  // namespace kvpool

NB_MODULE(_native, m) {
  using namespace kvpool;

  // An engine in a module's global lives until the process ends: not worth a message there.
  nb::set_leak_warnings(false);

  m.attr("PUT") = static_cast<int>(Op::kPut);
  m.attr("GET") = static_cast<int>(Op::kGet);
  m.attr("CONTAINS") = static_cast<int>(Op::kContains);
  m.attr("DELETE") = static_cast<int>(Op::kDelete);
  m.attr("TOUCH") = static_cast<int>(Op::kTouch);
  m.attr("PUT_ABSENT") = static_cast<int>(Op::kPutAbsent);
  m.attr("MISS") = static_cast<int>(Status::kMiss);
  m.attr("OK") = static_cast<int>(Status::kOk);
  m.attr("NO_ROOM") = static_cast<int>(Status::kNoRoom);
  m.attr("FAULT") = static_cast<int>(Status::kFault);
  m.attr("CANCELLED") = static_cast<int>(Status::kCancelled);
  m.attr("TIMED_OUT") = static_cast<int>(Status::kTimedOut);
  m.attr("PRESENT") = static_cast<int>(Status::kPresent);
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

  nb::class_<PyBatch>(m, "Batch")
      .def("done", &PyBatch::done)
      .def("wait", &PyBatch::wait, "timeout_s"_a)
      .def("cancel", &PyBatch::cancel)
      .def("results", &PyBatch::results)
      .def("error", &PyBatch::error);

  nb::class_<PyEngine>(m, "Engine")
      .def("submit", &PyEngine::submit, "op"_a, "keys"_a, "buffers"_a.none(), "timeout_s"_a)
      .def("lookup", &PyEngine::lookup, "prefix"_a, "groups"_a, "timeout_s"_a)
      .def("counters", &PyEngine::counters)
      .def("close", &PyEngine::close, "timeout_s"_a);

  nb::exception<MalformedEvents>(m, "MalformedEvents", PyExc_ValueError);
  nb::class_<PyMatches>(m, "Matches")
      .def("__len__", &PyMatches::rows)
      .def("workers", &PyMatches::workers)
      .def("dp_ranks", &PyMatches::dp_ranks)
      .def("column", &PyMatches::column, "column"_a)
      .def("placed", &PyMatches::placed, "places"_a, "count"_a, "columns"_a);
  m.def("pack_varints", &pack_varints, "values"_a);
  nb::class_<PyMemoryBudget>(m, "MemoryBudget")
      .def(nb::init<std::size_t>(), "limit_nbytes"_a)
      .def_prop_ro("used_nbytes", &PyMemoryBudget::used_nbytes);
  // .none(): our own errors say more than nanobind's.
  nb::class_<PyTable>(m, "Table")
      .def(nb::init<std::size_t, bool, std::uint32_t, const PyMemoryBudget*>(), "max_blocks"_a,
           "reuse_reports"_a, "block_tokens"_a, "budget"_a.none())
      .def("apply", &PyTable::apply, "worker"_a.none(), "payload"_a.none(), "dp_rank"_a, "pool"_a.none())
      .def("match", &PyTable::match, "hashes64"_a.none(), "workers"_a.none())
      .def("remove_worker", &PyTable::remove_worker, "worker"_a.none())
      .def("clear", &PyTable::clear, "worker"_a.none(), "dp_rank"_a.none(), "tiers"_a)
      .def("doubt", &PyTable::doubt, "worker"_a.none(), "cursor"_a)
      .def("expel", &PyTable::expel, "worker"_a.none())
      .def("evicted", &PyTable::evicted, "worker"_a.none())
      .def("workers", &PyTable::workers)
      .def("content", &PyTable::content, "worker"_a.none())
      .def("image", &PyTable::image)
      .def("held_by", &PyTable::held_by, "worker"_a.none())
      .def("stats", &PyTable::stats);
  nb::exception<DamagedImage>(m, "DamagedImage", PyExc_ValueError);
  nb::class_<PyTableImage>(m, "TableImage").def("pack", &PyTableImage::pack);
  m.def("table_of", &py_table_of, "packed"_a.none(), "max_blocks"_a, "reuse_reports"_a, "block_tokens"_a,
        "budget"_a.none(), nb::rv_policy::take_ownership);

  m.def("open_file_engine", &open_file_engine, "root"_a, "capacity_nbytes"_a, "threads"_a);
  m.def("find_file_engine", &find_file_engine, "root"_a);
  m.def("make_file_pool", &make_file_pool, "root"_a);
  nb::exception<RefusedDirectory>(m, "RefusedDirectory");
  nb::exception<RespError>(m, "RespError");
  nb::exception<TlsError>(m, "TlsError");
  m.def("open_resp_engine", &open_resp_engine, "host"_a, "port"_a, "unix_path"_a, "user"_a, "password"_a,
        "database"_a, "ttl_s"_a, "connections"_a, "tls"_a.none(), "client"_a, "version"_a);

  auto bare_server = nb::class_<BareServer>(m, "BareServer");
  bare_server.def(
      "__init__",
      [](BareServer* loop, const std::string& host, std::uint16_t port, const std::string& unix_path,
         const std::string& user, const std::string& password, unsigned database, unsigned connections) {
        without_gil(
            [&] { new (loop) BareServer({host, port, unix_path}, user, password, database, connections); });
      },
      "host"_a, "port"_a, "unix_path"_a, "user"_a, "password"_a, "database"_a, "connections"_a);
  bind_bare(bare_server);
  auto bare_files = nb::class_<BareFiles>(m, "BareFiles");
  bare_files.def(
      "__init__",
      [](BareFiles* loop, const std::string& folder, unsigned threads) {
        new (loop) BareFiles(folder, threads);
      },
      "folder"_a, "threads"_a);
  bind_bare(bare_files);
  nb::class_<PyTopology>(m, "Topology")
      .def("install", &PyTopology::install, "nodes"_a)
      .def("wait_for_doubt", &PyTopology::wait_for_doubt, "timeout_s"_a)
      .def("close", &PyTopology::close)
      .def("closed", &PyTopology::closed);
  m.def("open_routed_resp_engine", &open_routed_resp_engine, "user"_a, "password"_a, "database"_a, "ttl_s"_a,
        "connections"_a, "tls"_a.none(), "client"_a, "version"_a);
}
