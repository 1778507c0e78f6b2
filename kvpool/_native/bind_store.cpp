// Python bindings of store/: batches, the executor, its stores of files and of servers.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "buffers.h"
#include "fast_sequence.h"
#include "store/file.h"
#include "store/io_executor.h"
#include "store/lookup.h"
#include "store/resp.h"
#include "store/tls.h"

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
  const FastSequence items(sequence.ptr());
  std::vector<Key> parsed;
  parsed.reserve(static_cast<std::size_t>(items.size()));
  for (Py_ssize_t i = 0; i < items.size(); ++i) {
    PyObject* item = items[i];
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

class PyIoExecutor {
 public:
  explicit PyIoExecutor(std::unique_ptr<IoExecutor> executor)
      : executor_(std::move(executor)), orphans_(std::make_shared<Orphans>()) {}
  PyIoExecutor(PyIoExecutor&&) = default;
  PyIoExecutor& operator=(PyIoExecutor&&) = delete;
  ~PyIoExecutor() {
    if (!executor_) return;
    without_gil([this] { executor_.reset(); });
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
      const auto count = static_cast<std::size_t>(PyTuple_Size(fixed.ptr()));
      if (count != parsed.size()) {
        throw std::invalid_argument(std::to_string(parsed.size()) + " keys, but " + std::to_string(count) +
                                    " buffers");
      }
      spans.reserve(count);
      for (std::size_t i = 0; i < count; ++i) {
        if (!held.add(PyTuple_GetItem(fixed.ptr(), static_cast<Py_ssize_t>(i)), op == Op::kGet)) {
          throw nb::python_error();
        }
        spans.push_back(held[i]);
      }
    }
    std::shared_ptr<Batch> batch = executor_->submit(op, std::move(parsed), std::move(spans), timeout);
    return PyBatch(std::move(batch), std::move(held), orphans_);
  }

  PyBatch lookup(std::string_view prefix, nb::handle groups, double timeout_s) {
    orphans_->reap();
    const Clock::duration timeout = to_duration(timeout_s, false);
    std::vector<LookupGroup> read;
    PyBuffers held;
    for (const nb::handle one : groups) {
      const auto [hashes, hash_nbytes, group, ranks, record_tokens, sliding_window] =
          nb::cast<std::tuple<nb::bytes, std::size_t, std::uint16_t, std::uint32_t, std::uint64_t, bool>>(
              one);
      if (hashes.size() != 0 && !held.add(hashes.ptr(), false)) throw nb::python_error();
      read.push_back({as_text(hashes), hash_nbytes, group, ranks, record_tokens, sliding_window});
    }
    std::shared_ptr<Batch> batch = executor_->submit(std::make_unique<Lookup>(prefix, read), timeout);
    return PyBatch(std::move(batch), std::move(held), orphans_);
  }

  nb::dict counters() {
    orphans_->reap();
    const Counters counters = without_gil([this] { return executor_->counters(); });
    nb::dict result;
    for (const auto& [name, value] : counters) result[nb::str(name.data(), name.size())] = value;
    return result;
  }

  bool close(double timeout_s) {
    const Clock::duration timeout = to_duration(timeout_s, true);
    const bool closed = without_gil([&] { return executor_->close(timeout); });
    orphans_->reap();
    return closed;
  }

 private:
  std::unique_ptr<IoExecutor> executor_;
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

PyIoExecutor make_file_executor(const std::string& root, std::uint64_t capacity_nbytes, unsigned threads,
                                FileBackend::Open how) {
  if (capacity_nbytes == 0) throw std::invalid_argument("capacity_nbytes must be at least 1");
  if (threads < 1 || threads > kMaxThreads) throw std::invalid_argument("threads must be from 1 to 256");
  return PyIoExecutor(with_os_errors(root, [&] {
    return std::make_unique<IoExecutor>(std::make_unique<FileBackend>(root, capacity_nbytes, how), threads);
  }));
}

PyIoExecutor open_file_executor(const std::string& root, std::uint64_t capacity_nbytes, unsigned threads) {
  return make_file_executor(root, capacity_nbytes, threads, FileBackend::Open::kMake);
}

// Of a pool that is there, with one thread: nothing is evicted to a capacity.
PyIoExecutor find_file_executor(const std::string& root) {
  return make_file_executor(root, std::numeric_limits<std::uint64_t>::max(), 1, FileBackend::Open::kFind);
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

PyIoExecutor open_resp_executor(const std::string& host, int port, const std::string& unix_path,
                                const std::string& user, const std::string& password, int database,
                                double ttl_s, unsigned connections, const std::optional<PyTlsFiles>& tls,
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
    return PyIoExecutor(without_gil([&] {
      return std::make_unique<IoExecutor>(std::make_unique<RespBackend>(std::move(settings)), connections);
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
  bool wait_until_stale(double timeout_s) {
    const Clock::time_point until = Clock::now() + to_duration(timeout_s, true);
    return without_gil([&] { return topology_->wait_until_stale(until); });
  }
  void close() { topology_->close(); }
  bool closed() const { return topology_->closed(); }

 private:
  std::shared_ptr<Topology> topology_;
};

nb::tuple open_routed_resp_executor(const std::string& user, const std::string& password, int database,
                                    double ttl_s, unsigned connections, const std::optional<PyTlsFiles>& tls,
                                    const std::string& client, const std::string& version) {
  auto topology = std::make_shared<Topology>(
      resp_settings(user, password, database, ttl_s, connections, tls, client, version));
  try {
    PyIoExecutor executor(without_gil(
        [&] { return std::make_unique<IoExecutor>(std::make_unique<RespBackend>(topology), connections); }));
    return nb::make_tuple(std::move(executor), PyTopology(topology));
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
  }
  throw nb::python_error();
}

}  // namespace

void bind_store(nb::module_& m) {
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

  nb::class_<PyBatch>(m, "Batch")
      .def("done", &PyBatch::done)
      .def("wait", &PyBatch::wait, "timeout_s"_a)
      .def("cancel", &PyBatch::cancel)
      .def("results", &PyBatch::results)
      .def("error", &PyBatch::error);

  nb::class_<PyIoExecutor>(m, "IoExecutor")
      .def("submit", &PyIoExecutor::submit, "op"_a, "keys"_a, "buffers"_a.none(), "timeout_s"_a)
      .def("lookup", &PyIoExecutor::lookup, "prefix"_a, "groups"_a, "timeout_s"_a)
      .def("counters", &PyIoExecutor::counters)
      .def("close", &PyIoExecutor::close, "timeout_s"_a);

  m.def("open_file_executor", &open_file_executor, "root"_a, "capacity_nbytes"_a, "threads"_a);
  m.def("find_file_executor", &find_file_executor, "root"_a);
  m.def("make_file_pool", &make_file_pool, "root"_a);
  m.def("system_authorities", &system_authorities);
  nb::exception<RefusedDirectory>(m, "RefusedDirectory");
  nb::exception<RespError>(m, "RespError");
  nb::exception<TlsError>(m, "TlsError");
  m.def("open_resp_executor", &open_resp_executor, "host"_a, "port"_a, "unix_path"_a, "user"_a, "password"_a,
        "database"_a, "ttl_s"_a, "connections"_a, "tls"_a.none(), "client"_a, "version"_a);
  nb::class_<PyTopology>(m, "Topology")
      .def("install", &PyTopology::install, "nodes"_a)
      .def("wait_until_stale", &PyTopology::wait_until_stale, "timeout_s"_a)
      .def("close", &PyTopology::close)
      .def("closed", &PyTopology::closed);
  m.def("open_routed_resp_executor", &open_routed_resp_executor, "user"_a, "password"_a, "database"_a,
        "ttl_s"_a, "connections"_a, "tls"_a.none(), "client"_a, "version"_a);
}

}  // namespace kvpool
