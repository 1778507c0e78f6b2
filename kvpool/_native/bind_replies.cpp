// Python bindings of store/resp_parser: a server's replies as Python objects, whether a host in them is one, and how an
// error ends a key.
//
// redis-py's parser takes some 10 us a line, and several times that beside threads that keep the GIL busy. How
// many lines a reply has is the server's matter: names of a tenant, keys of a scan, slots of a cluster.

#include <nanobind/stl/string_view.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "store/resp_dial.h"
#include "store/resp_parser.h"
#include "store/topology.h"

namespace kvpool {
namespace {

constexpr std::size_t kMaxDepth = 16;             // of lists in lists
constexpr std::size_t kReservedNbytes = 1 << 20;  // of a string before its bytes have come

// Used by one thread at a time, which the GIL sees to.
class PyReplies {
 public:
  explicit PyReplies(nb::object to_error) : to_error_(std::move(to_error)) {}

  void feed(nb::handle data) {
    const Bytes held(data);
    std::span<const std::byte> input = held.get();
    while (!input.empty()) {
      is_between_ = false;
      if (parser_.bulk_left() > 0) {
        const std::size_t n = std::min<std::size_t>(parser_.bulk_left(), input.size());
        bulk_.append(reinterpret_cast<const char*>(input.data()), n);
        parser_.take(n);
        input = input.subspan(n);
      } else if (const auto token = parser_.next(input)) {
        accept(*token);
      }
    }
  }

  bool ready() const { return !done_.empty(); }
  bool empty() const { return done_.empty() && is_between_; }

  nb::object take() {
    if (done_.empty()) throw std::runtime_error("no reply is complete: feed() first");
    nb::object reply = std::move(done_.front());
    done_.pop_front();
    return reply;
  }

 private:
  struct OpenList {
    nb::list items;
    std::int64_t left;
  };

  void accept(const RespToken& token) {
    switch (token.kind) {
      case RespKind::kBad:
        throw std::invalid_argument("no reply of Redis or Valkey");
      case RespKind::kSimple:
        return add(nb::bytes(token.text.data(), token.text.size()));
      case RespKind::kError:
        return add(to_error_(nb::bytes(token.text.data(), token.text.size())));
      case RespKind::kInteger:
        return add(nb::int_(token.value));
      case RespKind::kNil:
        return add(nb::none());
      case RespKind::kBulk:
        bulk_.clear();
        bulk_.reserve(std::min(static_cast<std::size_t>(token.value), kReservedNbytes));
        return;
      case RespKind::kBulkEnd:
        add(nb::bytes(bulk_.data(), bulk_.size()));
        if (bulk_.capacity() > kReservedNbytes) std::string().swap(bulk_);
        return;
      case RespKind::kArray:
        if (open_.size() == kMaxDepth) throw std::invalid_argument("a reply of too many lists in lists");
        if (token.value == 0) return add(nb::list());
        open_.push_back({nb::list(), token.value});
        return;
    }
  }

  void add(nb::object item) {
    while (!open_.empty()) {
      open_.back().items.append(item);
      if (--open_.back().left > 0) return;
      item = std::move(open_.back().items);
      open_.pop_back();
    }
    done_.push_back(std::move(item));
    is_between_ = true;
  }

  nb::object to_error_;
  RespParser parser_;
  std::string bulk_;            // the string that is coming
  std::vector<OpenList> open_;  // lists whose items are coming, the innermost last
  std::deque<nb::object> done_;
  bool is_between_ = true;  // two replies
};

}  // namespace

void bind_replies(nb::module_& m) {
  nb::class_<PyReplies>(m, "Replies")
      .def(nb::init<nb::object>(), "to_error"_a)
      .def("feed", &PyReplies::feed, "data"_a)
      .def("ready", &PyReplies::ready)
      .def("empty", &PyReplies::empty)
      .def("take", &PyReplies::take);
  m.def("is_host", &is_host, "host"_a);
  m.def(
      "error_status", [](std::string_view words) { return static_cast<int>(error_status(words)); },
      "words"_a);
}

}  // namespace kvpool
