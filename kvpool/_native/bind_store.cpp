// Python bindings of store/: batches, the executor, its stores of files and of servers. Over 400 lines because they
// share how buffers, orphans and the system's errors cross into Python.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "store/file.h"
#include "store/io_executor.h"
#include "store/lookup.h"
#include "store/near_far/near_far.h"
#include "store/pool_listing.h"
#include "store/refused_size.h"
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

using Buffers = std::vector<Bytes>;

// Buffers of batches whose Python object is gone before their threads are done with them. Needs the GIL.
class Orphans {
 public:
  ~Orphans() {
    reap();
    // Threads may touch them for ever after.
    if (!orphans_.empty()) new std::vector<Orphan>(std::move(orphans_));
  }
  void adopt(std::shared_ptr<Batch> batch, Buffers buffers) {
    orphans_.emplace_back(std::move(batch), std::move(buffers));
  }
  // Releases what is done; called on every way into the executor. Exporters may run Python code then, so the
  // buffers are moved out first.
  void reap() {
    const auto done = std::partition(orphans_.begin(), orphans_.end(),
                                     [](const Orphan& orphan) { return !orphan.first->done(); });
    const std::vector<Orphan> reaped(std::make_move_iterator(done), std::make_move_iterator(orphans_.end()));
    orphans_.erase(done, orphans_.end());
  }

 private:
  using Orphan = std::pair<std::shared_ptr<Batch>, Buffers>;
  std::vector<Orphan> orphans_;
};

// The Python side of a batch. Its members are touched under the GIL only.
class PyBatch {
 public:
  PyBatch(std::shared_ptr<Batch> batch, Buffers buffers, std::shared_ptr<Orphans> orphans, bool is_get)
      : batch_(std::move(batch)),
        buffers_(std::move(buffers)),
        orphans_(std::move(orphans)),
        is_get_(is_get) {}
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
    if (is_done) const Buffers released = std::exchange(buffers_, {});  // exporters may run Python code
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

  bool given_up() const { return batch_->given_up(); }

  nb::bytes results() {
    require_done();
    return to_bytes(batch_->results());
  }

  nb::bytes writers() {
    require_done();
    std::vector<Writer> writers;
    for (std::size_t i = 0; is_get_ && i < batch_->results().size(); ++i) {
      writers.push_back(batch_->found(i).seal.value_or(Seal{}).writer);
    }
    return to_bytes(writers);
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
  Buffers buffers_;
  std::shared_ptr<Orphans> orphans_;
  bool is_get_;
};

std::vector<Key> read_keys(nb::handle keys) {
  if (PyUnicode_Check(keys.ptr())) throw nb::type_error("keys must be a sequence of str, not one str");
  const FastSequence items(keys, "keys must be a sequence of str");
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
  explicit PyIoExecutor(std::shared_ptr<IoExecutor> executor)
      : executor_(std::move(executor)), orphans_(std::make_shared<Orphans>()) {}
  PyIoExecutor(PyIoExecutor&&) = default;
  PyIoExecutor& operator=(PyIoExecutor&&) = delete;
  ~PyIoExecutor() {
    if (!executor_) return;
    without_gil([this] { executor_.reset(); });
    orphans_->reap();
  }

  PyBatch submit(int op_number, nb::handle keys, nb::handle buffers, double timeout_s,
                 std::optional<double> max_s, const nb::bytes& writer) {
    orphans_->reap();
    if (op_number < 0 || op_number >= static_cast<int>(kOpCount)) {
      throw std::invalid_argument("op must be PUT, GET, CONTAINS, DELETE, TOUCH, PUT_ABSENT or EXPIRE");
    }
    const auto op = static_cast<Op>(op_number);
    const Clock::duration timeout = to_duration(timeout_s, false);
    const Clock::duration longest = to_duration(max_s.value_or(timeout_s), false);
    std::vector<Key> parsed = read_keys(keys);

    if (moves_bytes(op) == buffers.is_none()) {
      throw std::invalid_argument(moves_bytes(op) ? "PUT, GET and PUT_ABSENT need buffers"
                                                  : "CONTAINS, DELETE, TOUCH and EXPIRE take no buffers");
    }
    Buffers held;
    std::vector<Batch::Buffer> spans;
    if (moves_bytes(op)) {
      const FastSequence sequence(buffers, "buffers must be a sequence of buffers");
      // A tuple of our own: an exporter may run Python code that changes the list.
      const nb::tuple fixed(sequence.get());
      if (fixed.size() != parsed.size()) {
        throw std::invalid_argument(std::to_string(parsed.size()) + " keys, but " +
                                    std::to_string(fixed.size()) + " buffers");
      }
      for (const nb::handle buffer : fixed) {
        held.emplace_back(buffer, op == Op::kGet ? PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE : PyBUF_C_CONTIGUOUS);
        spans.push_back(held.back().get());
        if (spans.back().empty())
          throw std::invalid_argument("a buffer is empty: a record has at least one byte");
      }
    }
    std::vector<Found> known;
    if (is_put(op)) known.assign(parsed.size(), Found{0, Seal{read_writer(writer), {}}});
    std::shared_ptr<Batch> batch =
        executor_->submit(op, std::move(parsed), std::move(spans), timeout, longest, {}, std::move(known));
    return PyBatch(std::move(batch), std::move(held), orphans_, op == Op::kGet);
  }

  PyBatch lookup(std::string_view prefix, nb::handle groups, double timeout_s) {
    orphans_->reap();
    const Clock::duration timeout = to_duration(timeout_s, false);
    std::vector<LookupGroup> read;
    Buffers held;
    for (const nb::handle one : groups) {
      const auto [hashes, hash_nbytes, group, ranks, record_tokens, sliding_window, prefetch_nbytes] =
          nb::cast<std::tuple<nb::bytes, std::size_t, std::uint16_t, std::uint32_t, std::uint64_t, bool,
                              std::size_t>>(one);
      held.emplace_back(hashes);
      read.push_back(
          {as_text(hashes), hash_nbytes, group, ranks, record_tokens, sliding_window, prefetch_nbytes});
    }
    std::shared_ptr<Batch> batch = executor_->submit(std::make_unique<Lookup>(prefix, read), timeout);
    return PyBatch(std::move(batch), std::move(held), orphans_, false);
  }

  nb::dict counters() {
    orphans_->reap();
    const Counters counters = without_gil([this] { return executor_->counters(); });
    nb::dict result;
    for (const auto& [name, value] : counters) result[to_str(name)] = value;
    return result;
  }

  std::shared_ptr<IoExecutor> executor() const { return executor_; }

  bool close(double timeout_s) {
    const Clock::duration timeout = to_duration(timeout_s, true);
    const bool closed = without_gil([&] { return executor_->close(timeout); });
    orphans_->reap();
    return closed;
  }

 private:
  std::shared_ptr<IoExecutor> executor_;
  std::shared_ptr<Orphans> orphans_;
};

// Calls open() without the GIL; the system's errors become OSError, of files with their path.
template <typename Open>
auto with_os_errors(Open open) {
  try {
    return without_gil(open);
  } catch (const std::filesystem::filesystem_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrnoWithFilename(PyExc_OSError, error.path1().c_str());
  } catch (const Unreachable& error) {
    const nb::object raised = nb::borrow(PyExc_OSError)(error.error_number(), error.what());
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
  } catch (const std::system_error& error) {
    const nb::object raised = nb::borrow(PyExc_OSError)(error.code().value(), error.what());
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
  }
  throw nb::python_error();
}

void refuse_zeros(std::initializer_list<std::string_view> texts) {
  for (const std::string_view text : texts) {
    if (text.find('\0') != std::string_view::npos)
      throw std::invalid_argument("no path and no setting may hold a zero byte");
  }
}

PyIoExecutor open_file_executor(const std::string& root, std::optional<std::uint64_t> capacity_nbytes,
                                unsigned threads, double lock_patience_s) {
  refuse_zeros({root});
  if (root.empty()) throw std::invalid_argument("root must be a path");
  if (capacity_nbytes == std::uint64_t{0}) throw std::invalid_argument("capacity_nbytes must be at least 1");
  if (threads < 1 || threads > kMaxThreads) throw std::invalid_argument("threads must be from 1 to 256");
  const auto patience = std::chrono::duration<double>(lock_patience_s);
  return PyIoExecutor(with_os_errors([&] {
    return std::make_unique<IoExecutor>(
        std::make_unique<FileBackend>(root, capacity_nbytes, std::chrono::duration_cast<Patience>(patience)),
        threads);
  }));
}

void set_pool_capacity(const std::string& root, std::uint64_t nbytes) {
  refuse_zeros({root});
  if (nbytes < kLeastCapacity || nbytes >= kUnlimited)
    throw std::invalid_argument("a capacity is at least 1 MiB");
  with_os_errors([&] {
    if (const int error = write_capacity(root, find_pool(root).file_mode, nbytes); error != 0)
      fail("cannot write", root + "/capacity", error);
    return 0;
  });
}

void make_file_pool(const std::string& root) {
  with_os_errors([&] { return make_pool(root).inode; });
}

class PyPoolListing {
 public:
  PyPoolListing(const std::string& root, const std::string& tenant, const std::string& name_space,
                std::size_t most_records)
      : listing_(root, tenant, name_space, most_records) {
    refuse_zeros({root, tenant, name_space});
  }

  std::size_t look() {
    return with_os_errors([this] { return listing_.look(); });
  }
  nb::list changes() {
    nb::list found;
    for (const auto& [group, came, went] : without_gil([this] { return listing_.changes(); })) {
      found.append(nb::make_tuple(group, came, went));
    }
    return found;
  }
  void told() {
    without_gil([this] { listing_.told(); });
  }
  void forget() { listing_.forget(); }

 private:
  PoolListing listing_;
};

std::tuple<std::uint64_t, std::uint64_t, std::uint64_t> file_system_of(const nb::bytes& path) {
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  const auto [total, free, reserve] = file ? file_system(file.get()) : FileSystem{};
  return {total, free, reserve};
}

using PyTlsFiles = std::tuple<std::string, std::string, std::string>;

// user, password, its file, database, ttl_s, connections, tls, client, version: of any server.
using PySettings = std::tuple<std::string, std::string, std::string, int, double, unsigned,
                              std::optional<PyTlsFiles>, std::string, std::string>;

RespSettings to_settings(const PySettings& given) {
  const auto& [user, password, password_file, database, ttl_s, connections, tls, client, version] = given;
  refuse_zeros({user, password, password_file, client, version});
  if (password.empty() && password_file.empty() && !user.empty())
    throw std::invalid_argument("a user needs a password");
  if (database < 0) throw std::invalid_argument("database must be at least 0");
  if (!(ttl_s >= 0.001 && ttl_s <= kMaxTtl_s)) throw std::invalid_argument("ttl_s must be 0.001 to 10 years");
  if (connections < 1 || connections > kMaxThreads)
    throw std::invalid_argument("connections must be from 1 to 256");
  RespSettings settings;
  settings.user = user;
  settings.password = password;
  settings.password_file = password_file;
  settings.database = static_cast<unsigned>(database);
  settings.client = client;
  settings.version = version;
  settings.ttl = std::chrono::milliseconds(static_cast<std::int64_t>(ttl_s * 1e3));
  if (tls) {
    const auto& [ca, cert, key] = *tls;
    refuse_zeros({ca, cert, key});
    if (cert.empty() != key.empty()) throw std::invalid_argument("cert and key go together");
    settings.tls = without_gil([&] { return std::make_shared<TlsSource>(TlsFiles{ca, cert, key}); });
  }
  return settings;
}

PyIoExecutor open_resp_executor(const std::string& host, int port, const std::string& unix_path,
                                const PySettings& of_any) {
  RespSettings settings = to_settings(of_any);
  refuse_zeros({host, unix_path});
  if (unix_path.empty() == host.empty()) throw std::invalid_argument("give a host or a unix_path");
  if (!host.empty() && (port < 1 || port > 65535))
    throw std::invalid_argument("port must be from 1 to 65535");
  settings.endpoint = {host, static_cast<std::uint16_t>(port), unix_path};
  return PyIoExecutor(with_os_errors([&] {
    return std::make_unique<IoExecutor>(std::make_unique<RespBackend>(std::move(settings)),
                                        std::get<unsigned>(of_any));
  }));
}

nb::tuple open_routed_resp_executor(const PySettings& of_any) {
  auto topology = std::make_shared<Topology>(to_settings(of_any));
  PyIoExecutor executor(with_os_errors([&] {
    return std::make_unique<IoExecutor>(std::make_unique<RespBackend>(topology), std::get<unsigned>(of_any));
  }));
  return nb::make_tuple(std::move(executor), std::move(topology));
}

PyIoExecutor open_near_far_executor(const PyIoExecutor& near, const PyIoExecutor& far, bool all,
                                    double far_ttl_s) {
  if (!(far_ttl_s >= 0 && far_ttl_s <= kMaxTtl_s))
    throw std::invalid_argument("far_ttl_s must be 0 to 10 years");
  const auto far_ttl = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(far_ttl_s));
  return PyIoExecutor(with_os_errors([&] {
    return std::make_shared<IoExecutor>(
        std::make_unique<NearFarBackend>(near.executor(), far.executor(), all, far_ttl), 1);
  }));
}

}  // namespace

void bind_store(nb::module_& m) {
  m.attr("MIN_CAPACITY_NBYTES") = kLeastCapacity;
  m.attr("PUT") = static_cast<int>(Op::kPut);
  m.attr("GET") = static_cast<int>(Op::kGet);
  m.attr("CONTAINS") = static_cast<int>(Op::kContains);
  m.attr("DELETE") = static_cast<int>(Op::kDelete);
  m.attr("TOUCH") = static_cast<int>(Op::kTouch);
  m.attr("PUT_ABSENT") = static_cast<int>(Op::kPutAbsent);
  m.attr("EXPIRE") = static_cast<int>(Op::kExpire);
  m.attr("MISS") = static_cast<int>(Status::kMiss);
  m.attr("OK") = static_cast<int>(Status::kOk);
  m.attr("NO_ROOM") = static_cast<int>(Status::kNoRoom);
  m.attr("FAULT") = static_cast<int>(Status::kFault);
  m.attr("CANCELLED") = static_cast<int>(Status::kCancelled);
  m.attr("TIMED_OUT") = static_cast<int>(Status::kTimedOut);
  m.attr("PRESENT") = static_cast<int>(Status::kPresent);
  m.attr("NEAR") = static_cast<int>(Status::kNear);
  m.attr("REFUSED") = static_cast<int>(Status::kRefused);

  nb::class_<PyBatch>(m, "Batch")
      .def("done", &PyBatch::done)
      .def("wait", &PyBatch::wait, "timeout_s"_a)
      .def("cancel", &PyBatch::cancel)
      .def("given_up", &PyBatch::given_up)
      .def("results", &PyBatch::results)
      .def("writers", &PyBatch::writers)
      .def("error", &PyBatch::error);

  nb::class_<PyIoExecutor>(m, "IoExecutor")
      .def("submit", &PyIoExecutor::submit, "op"_a, "keys"_a, "buffers"_a.none(), "timeout_s"_a,
           "max_s"_a = nb::none(), "writer"_a = nb::bytes("", 0))
      .def("lookup", &PyIoExecutor::lookup, "prefix"_a, "groups"_a, "timeout_s"_a)
      .def("counters", &PyIoExecutor::counters)
      .def("close", &PyIoExecutor::close, "timeout_s"_a);

  nb::class_<RefusedSize>(m, "RefusedSize")
      .def(nb::init<>())
      .def(
          "why", [](RefusedSize& sizes, std::size_t nbytes) { return sizes.why(nbytes, Clock::now()); },
          "nbytes"_a)
      .def(
          "ended",
          [](RefusedSize& sizes, std::size_t nbytes, std::string words, bool said) {
            sizes.ended(nbytes, std::move(words), said, Clock::now());
          },
          "nbytes"_a, "words"_a, "said"_a)
      .def("moved", &RefusedSize::moved, "nbytes"_a)
      .def("forget", &RefusedSize::forget);

  nb::class_<PyPoolListing>(m, "PoolListing")
      .def(nb::init<const std::string&, const std::string&, const std::string&, std::size_t>(), "root"_a,
           "tenant"_a, "namespace"_a, "most_records"_a)
      .def("look", &PyPoolListing::look)
      .def("changes", &PyPoolListing::changes)
      .def("told", &PyPoolListing::told)
      .def("forget", &PyPoolListing::forget);

  m.def("open_file_executor", &open_file_executor, "root"_a, "capacity_nbytes"_a.none(), "threads"_a,
        "lock_patience_s"_a = std::chrono::duration<double>(kLockPatience).count());
  m.def("make_file_pool", &make_file_pool, "root"_a);
  m.def("set_pool_capacity", &set_pool_capacity, "root"_a, "nbytes"_a);
  m.def("file_system", &file_system_of, "path"_a);
  m.def("system_authorities", &system_authorities);
  nb::exception<RefusedDirectory>(m, "RefusedDirectory");
  nb::exception<RespError>(m, "RespError");
  nb::exception<TlsError>(m, "TlsError");
  m.def("open_resp_executor", &open_resp_executor, "host"_a, "port"_a, "unix_path"_a, "settings"_a);
  using Slots = std::vector<std::pair<unsigned, unsigned>>;
  nb::class_<Topology>(m, "Topology")
      .def(
          "install",
          [](Topology& topology, const std::vector<std::tuple<std::string, unsigned, Slots>>& nodes) {
            std::vector<NodeSlots> slots;
            for (const auto& node : nodes) slots.push_back(std::make_from_tuple<NodeSlots>(node));
            without_gil([&] { topology.install(slots); });
          },
          "nodes"_a)
      .def(
          "wait_until_stale",
          [](Topology& topology, double timeout_s) {
            const Clock::time_point until = Clock::now() + to_duration(timeout_s, true);
            return without_gil([&] { return topology.wait_until_stale(until); });
          },
          "timeout_s"_a)
      .def("close", &Topology::close)
      .def("closed", &Topology::closed);
  m.def("open_routed_resp_executor", &open_routed_resp_executor, "settings"_a);
  m.def("open_near_far_executor", &open_near_far_executor, "near"_a, "far"_a, "all_goes_far"_a,
        "far_ttl_s"_a);
}

}  // namespace kvpool
