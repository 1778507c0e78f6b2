// Takes, queues, resends and gives up a connection's requests. See resp_connection.h.
#include "store/resp_connection.h"

#include <algorithm>
#include <utility>

namespace kvpool {
namespace {

using namespace std::chrono_literals;
using Kind = RespRequest::Kind;

// Bytes in flight on a connection. A server prepares all pipelined replies before it writes, and copies the
// next value's received part; a short send window keeps both in the processor's caches
// (docs/decisions/0017-size-windows-by-the-link.md). Received bytes do not count, so the next request leaves
// before a large reply ends.
constexpr std::size_t kReadSendWindowNbytes = 256 << 10;
constexpr std::size_t kWriteSendWindowNbytes = 2 * kUnansweredNbytes;
constexpr std::size_t kMaxSendWindowNbytes = 4 << 20;
constexpr std::size_t kLinkNbytesPerUs = 4096;  // 4 GB/s: assumed capacity of a longer link
constexpr std::size_t kMaxRequests = 4096;
// Most bytes waiting for one server's send window. Beyond it the I/O thread takes no items at all: items keep
// their order, and I/O threads share them evenly.
constexpr std::size_t kWaitingNbytes = 8 << 20;
// Except that a server whose items wait for longer holds up no other, whether it is slow or silent: more of them wait,
// until their deadlines. At the most of them only one that moves no byte for so long is passed over; its items are faults.
constexpr auto kQuiet = 250ms;
constexpr std::size_t kMaxWaiting = 65536 + kMaxTogether;
// The reply to a given up item must end within this, even while bytes move.
constexpr auto kLongestDrain = 60s;

std::size_t cost_of(const Item& item) {
  return kRequestNbytes + (moves_bytes(item.op()) ? item.buffer().size() : 0);
}

}  // namespace

RespConnection::RespConnection(std::shared_ptr<RespNode> node, Role role, Topology& topology,
                               RespCounts& counts, RespUses& uses, std::span<std::byte> scratch,
                               unsigned seed)
    : node_(std::move(node)),
      role_(role),
      topology_(topology),
      counts_(counts),
      uses_(uses),
      settings_(node_->settings),
      addresses_(node_->addresses()),
      scratch_(scratch),
      random_(seed) {}

RespConnection::~RespConnection() { hang_up(); }

bool RespConnection::awaiting() const { return !requests_.empty() && requests_.front()->on_the_wire(); }

Clock::time_point RespConnection::clogged_until() const {
  if (waiting_nbytes_ < kWaitingNbytes) return Clock::time_point::min();
  return (waiting_.size() + kMaxTogether <= kMaxWaiting ? waiting_.front().since : moved_at_) + kQuiet;
}

std::size_t RespConnection::send_window_nbytes() const {
  const std::size_t least = role_ == Role::kReads ? kReadSendWindowNbytes : kWriteSendWindowNbytes;
  const auto round_trip_us = static_cast<std::size_t>(round_trip_.count());
  return std::max(least, std::min(round_trip_us, kMaxSendWindowNbytes / kLinkNbytesPerUs) * kLinkNbytesPerUs);
}

bool RespConnection::is_open() const {
  return (up_ || !is_wanted_) && in_flight_nbytes_ < send_window_nbytes() && requests_.size() < kMaxRequests;
}

bool RespConnection::move(Clock::time_point now, std::size_t most) {
  if (!socket_) return false;
  begin_waiting();
  const bool was_full = is_full_;
  const bool sent = send_some(most);
  const bool got = socket_ && (readable_ || awaiting() || socket_.has_pending()) ? receive_some() : false;
  // A socket with room accepts bytes even from a dead peer.
  if (got || (sent && was_full)) {
    moved_at_ = now;
    if (!requests_.empty() && requests_.front()->item) requests_.front()->item->moved(now);
  }
  return sent || got;
}

pollfd RespConnection::polled() const {
  if (socket_) {
    const bool writes = first_unsent_ < requests_.size();
    return {socket_.fd(), socket_.events(writes), 0};
  }
  if (dial_) return {dial_->fd(), dial_->events(), 0};
  return {-1, 0, 0};
}

Clock::time_point RespConnection::wake_at() const {
  auto until = next_deadline_;
  if (is_clogged(Clock::now())) until = std::min(until, clogged_until());
  if (socket_ || !is_wanted_) return until;
  if (!dial_) return std::min(until, next_dial_);
  if (!failing_) until = std::min(until, dialled_at_ + grace());
  return std::min(until, dial_->wake_at());
}

void RespConnection::on_poll(short events) {
  readable_ = socket_ && (events & (POLLIN | POLLHUP | POLLERR)) != 0;
}

void RespConnection::again(std::unique_ptr<Request> request) {
  for (Item& item : request->joined) {
    requests_.push_back(std::make_unique<Request>(request->kind, std::move(item), settings_.ttl));
  }
  auto fresh = request->item ? std::make_unique<Request>(request->kind, std::move(*request->item),
                                                         settings_.ttl, request->asking, request->hops)
                             : std::make_unique<Request>(request->kind, std::move(request->key_text),
                                                         settings_.ttl, request->asking);
  fresh->deadline = request->deadline;
  requests_.push_back(std::move(fresh));
}

void RespConnection::end_all(std::string_view why) {
  for (const auto& request : requests_) end_item(*request, Status::kFault, std::string(why));
  requests_.clear();
  for (Item& item : take_waiting())
    item.finish(item.stopped(moved_at_).value_or(Status::kFault), std::string(why));
  recount_send_window();
}

// A cancelled or late item ends as such, not as a fault.
void RespConnection::end_item(Request& request, Status status, std::string words, Blame blame) {
  if (!request.item) return;
  const auto stopped = request.item->stopped();
  if (stopped && status == Status::kFault) {
    status = *stopped;
    words.clear();
    blame = Blame::kUnknown;
  }
  for (Item& item : request.joined) item.finish(status, words, blame);
  request.joined.clear();
  request.item->finish(status, std::move(words), blame);
  request.item.reset();
}

void RespConnection::push(Item&& taken) {
  is_wanted_ = true;
  if (refuses()) {
    counts_.refused.fetch_add(1, std::memory_order_relaxed);
    return taken.finish(Status::kFault, last_error_, Blame::kStore);
  }
  if (has_room()) return begin(std::move(taken));
  if (waiting_.size() >= kMaxWaiting) {
    return taken.finish(Status::kFault, settings_.endpoint.name() + ": the server does not answer",
                        Blame::kStore);
  }
  waiting_nbytes_ += cost_of(taken);
  next_deadline_ = std::min(next_deadline_, taken.deadline());
  waiting_.push_back({std::move(taken), Clock::now()});
}

void RespConnection::begin_waiting() {
  while (!waiting_.empty() && is_open()) {
    waiting_nbytes_ -= cost_of(waiting_.front().item);
    begin(std::move(waiting_.front().item));
    waiting_.pop_front();
  }
}

std::deque<Item> RespConnection::take_waiting() {
  waiting_nbytes_ = 0;
  std::deque<Item> items;
  for (Waiting& one : std::exchange(waiting_, {})) items.push_back(std::move(one.item));
  return items;
}

RespRequest::Kind RespConnection::kind_of(Op op) const {
  switch (op) {
    case Op::kPut:
      return Kind::kPut;
    case Op::kGet:
      return Kind::kGet;
    case Op::kDelete:
      return Kind::kDelete;
    case Op::kContains:
      return Kind::kContains;
    case Op::kExpire:
      return Kind::kExpire;
    default:
      return touches_ ? Kind::kTouch : Kind::kContains;
  }
}

void RespConnection::begin(Item&& taken) {
  if (joins_ && !requests_.empty() && requests_.back()->can_join(taken)) {
    requests_.back()->join(std::move(taken));
    requests_.back()->cost_left += kRequestNbytes;
    in_flight_nbytes_ += kRequestNbytes;
    return;
  }
  const Kind kind = kind_of(taken.op());
  add(std::make_unique<Request>(kind, std::move(taken), settings_.ttl));
}

void RespConnection::push_redirected(std::unique_ptr<Request> request) {
  is_wanted_ = true;
  if (refuses()) return end_item(*request, Status::kFault, last_error_, Blame::kStore);
  add(std::move(request));
}

void RespConnection::end_redirected(Redirect&& redirect, std::string words) {
  end_item(*redirect.request, Status::kFault, std::move(words), Blame::kStore);
}

RefusedSize* RespConnection::refused(Kind kind) const {
  if (kind == Kind::kPut) return &node_->puts;
  return kind == Kind::kGet ? &node_->gets : nullptr;
}

void RespConnection::add(std::unique_ptr<Request> request) {
  if (RefusedSize* const sizes = refused(request->kind)) {
    if (std::string why = sizes->why(request->item->buffer().size(), Clock::now()); !why.empty()) {
      counts_.refused.fetch_add(1, std::memory_order_relaxed);
      return end_item(*request, Status::kRefused, std::move(why));
    }
  }
  request->cost_left = request->cost();
  in_flight_nbytes_ += request->cost_left;
  if (requests_.empty()) moved_at_ = Clock::now();
  next_deadline_ = std::min(next_deadline_, request->deadline);
  requests_.push_back(std::move(request));
}

void RespConnection::release_send_window(Request& request, std::size_t nbytes) {
  const std::size_t paid = std::min(nbytes, request.cost_left);
  request.cost_left -= paid;
  in_flight_nbytes_ -= paid;
}

// After requests_ changed as a whole, with nothing on the wire.
void RespConnection::recount_send_window() {
  first_unsent_ = 0;
  in_flight_nbytes_ = 0;
  next_deadline_ = Clock::time_point::max();
  for (const auto& request : requests_) {
    request->cost_left = request->cost();
    in_flight_nbytes_ += request->cost_left;
    next_deadline_ = std::min(next_deadline_, request->deadline);
  }
  for (const Waiting& one : waiting_) next_deadline_ = std::min(next_deadline_, one.item.deadline());
}

// Bytes in motion mean a slow server, not a silent one: silence is half of the item's time without any. An item that
// wants its answer sooner than servers pause ends nobody else's.
bool RespConnection::is_silent(const Request& request, Clock::time_point now) const {
  return now - moved_at_ >= std::max<Clock::duration>(request.item->timeout() / 2, kQuiet);
}

// Releases its buffer; the rest of its reply is discarded. False: only the end of the connection does that.
bool RespConnection::let_go(Request& request, Status status, Clock::time_point now) {
  if (request.kind == Kind::kPut && !request.is_sent() && !request.give_up_sending()) return false;
  if (status == Status::kTimedOut) {
    request.patience = std::clamp<Clock::duration>(request.item->timeout() / 2, kQuiet, kRespPatience);
  }
  request.deadline = now + request.patience;
  request.lost_at = now + kLongestDrain;
  end_item(request, status, {});
  return true;
}

void RespConnection::give_up_stopped(Clock::time_point now) {
  bool silent = false;
  bool torn = false;
  next_deadline_ = Clock::time_point::max();
  for (auto& request : requests_) {
    if (request->item && request->kind != Kind::kCleanup) {
      request->deadline = request->item->deadline(moved_at_);
    }
    const auto stopped = request->item ? request->item->stopped(moved_at_) : std::nullopt;
    const bool is_over = !request->item && now >= request->deadline;
    if (!request->on_the_wire() && (stopped || is_over)) {
      if (stopped) end_item(*request, *stopped, {});
      if (is_over || request->kind != Kind::kCleanup) {
        release_send_window(*request, request->cost_left);
        request.reset();
        continue;
      }
    } else if (stopped == Status::kTimedOut && is_silent(*request, now)) {
      silent = true;
    } else if (stopped) {
      torn |= !let_go(*request, *stopped, now);
    } else if (is_over) {
      silent |= now - moved_at_ >= request->patience || now >= request->lost_at;
      request->deadline = moved_at_ + request->patience;
    }
    next_deadline_ = std::min(next_deadline_, request->deadline);
  }
  std::erase(requests_, nullptr);
  waiting_nbytes_ = 0;
  for (Waiting& one : std::exchange(waiting_, {})) {
    if (const auto stopped = one.item.stopped(moved_at_)) {
      one.item.finish(*stopped);
      continue;
    }
    waiting_nbytes_ += cost_of(one.item);
    next_deadline_ = std::min(next_deadline_, one.item.deadline(moved_at_));
    waiting_.push_back(std::move(one));
  }
  if (silent) {
    lose(Cause::kSilence, "the server does not answer in time");
  } else if (torn) {
    lose(Cause::kOurselves, "a put was cancelled in the middle");
  }
}

}  // namespace kvpool
