#include "resp_connection.h"

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

namespace kvpool {
namespace {

using namespace std::chrono_literals;
using Kind = RespRequest::Kind;

// A server makes every pipelined reply before it writes: unbounded pipelines halve its speed (1.5 against 3.2
// GB/s of 2 MiB GETs, Redis 7.0.15). Bytes that have arrived no longer count, so the next request is on its
// way when a large reply ends.
constexpr std::size_t kWindowNbytes = 1 << 20;
constexpr std::size_t kMaxRequests = 4096;
// What may wait for the window of one server; beyond it the lane waits, and so do all its servers: each takes
// its items in their order, and the lanes share them evenly.
constexpr std::size_t kWaitingNbytes = 8 << 20;
// But for a server that did not move a byte for so long, though it was asked to, the others do not wait. Its items
// do, each until its deadline: the server may only be slow.
constexpr auto kQuiet = 250ms;
constexpr std::size_t kMaxWaiting = 65536;
constexpr std::size_t kMaxParts = 64;  // of one sendmsg
// Until then a reply that nobody waits for any more has to have come, however much moves.
constexpr auto kLongestDrain = 60s;
constexpr auto kFirstBackoff = 10ms;
// A pause and an attempt together stay below a second: so soon is a server that came back used again.
constexpr auto kMaxBackoff = 400ms;
constexpr auto kConnectPatience = 500ms;
// For a first attempt to dial again; then requests do not wait for it any more.
constexpr auto kDialGrace = 250ms;

// What is sent for the rest of a put that was given up.
constexpr std::array<std::byte, kChunkNbytes> kZeros{};

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

bool RespConnection::is_quiet(Clock::time_point now) const {
  return (!socket_ || !requests_.empty()) && now - moved_at_ >= kQuiet;
}

bool RespConnection::is_clogged(Clock::time_point now) const {
  return waiting_nbytes_ >= kWaitingNbytes && !is_quiet(now);
}

bool RespConnection::has_room() const {
  return (up_ || !is_wanted_) && in_flight_nbytes_ < kWindowNbytes && requests_.size() < kMaxRequests;
}

bool RespConnection::move(Clock::time_point now) {
  if (!socket_) return false;
  begin_waiting();
  const bool was_full = is_full_;
  const bool sent = send_some();
  const bool got = socket_ && (readable_ || awaiting() || socket_.has_pending()) ? receive_some() : false;
  // What a socket takes that has room proves nothing of the other side.
  if (got || (sent && was_full)) moved_at_ = now;
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
  if (waiting_nbytes_ >= kWaitingNbytes && !is_quiet(Clock::now()))
    until = std::min(until, moved_at_ + kQuiet);
  if (socket_ || !is_wanted_) return until;
  if (!dial_) return std::min(until, next_dial_);
  if (!failing_) until = std::min(until, dialled_at_ + grace());
  return std::min(until, dial_->wake_at());
}

void RespConnection::came(short events) {
  readable_ = socket_ && (events & (POLLIN | POLLHUP | POLLERR)) != 0;
}

// ---- connection

void RespConnection::keep_up(Clock::time_point now) {
  if (!socket_ && is_wanted_) dial(now);
  if (socket_ && seen_doubts_ != node_->doubts.load()) look_after_doubt(now);
}

void RespConnection::dial(Clock::time_point now) {
  if (!dial_) {
    if (now < next_dial_) return;
    if (!find_addresses()) {
      ++attempts_;
      back_off();
      return;
    }
    seen_doubts_ = node_->doubts.load();
    dialled_at_ = now;
    dial_.emplace(settings_, addresses_, role_ == Role::kReads ? "reads" : "writes", now, kConnectPatience);
  }
  switch (dial_->step(now)) {
    case Dial::State::kUnderWay:
      if (!failing_ && now >= dialled_at_ + grace()) fail_all();
      return;
    case Dial::State::kReady:
      socket_ = dial_->take();
      dial_.reset();
      parser_.reset();
      readable_ = false;
      failing_ = false;
      stood_ = true;
      touches_ = true;  // its rights may have changed
      renews_ = true;
      is_full_ = false;
      moved_at_ = now;
      count_up(true);
      counts_.connections.fetch_add(1, std::memory_order_relaxed);
      return;
    case Dial::State::kFailed:
      last_error_ = dial_->error();
      dial_.reset();
      counts_.failed_dials.fetch_add(1, std::memory_order_relaxed);
      ++attempts_;
      back_off();
      return;
  }
}

// A name may stand for another address by now. The resolver blocks, so it is asked only when the server is
// gone, and only where there is no other: the addresses of a cluster's nodes are looked up by whoever installs
// its topology.
bool RespConnection::find_addresses() {
  try {
    if (!node_->asks_resolver) addresses_ = node_->addresses();
    // While one lane asks, the others go on refusing.
    if (node_->asks_resolver && attempts_ > 1 && !node_->resolving.test_and_set()) {
      const std::unique_ptr<std::atomic_flag, void (*)(std::atomic_flag*)> asking(
          &node_->resolving, [](std::atomic_flag* flag) { flag->clear(); });
      addresses_ = resolve(settings_.endpoint);
    }
  } catch (const Unreachable& error) {
    last_error_ = error.what();
  }
  if (!addresses_.empty()) return true;
  last_error_ = settings_.endpoint.name() + ": the name has no address";
  return false;
}

void RespConnection::back_off() {
  const unsigned doublings = std::min(attempts_ - 1, 10U);
  const auto longest = std::min<Clock::duration>(kFirstBackoff * (1U << doublings), kMaxBackoff);
  const double share = std::uniform_real_distribution<double>(0.5, 1.0)(random_);
  next_dial_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(longest * share);
  fail_all();
}

Clock::duration RespConnection::grace() const { return stood_ ? kDialGrace : kConnectPatience; }

// From here on until a PING is answered, whatever wants this server is a fault at once.
void RespConnection::fail_all() {
  failing_ = true;
  topology_.doubt();
  if (last_error_.empty()) last_error_ = settings_.endpoint.name() + ": no connection stands yet";
  for (const auto& request : requests_) {
    if (request->item) counts_.refused.fetch_add(1, std::memory_order_relaxed);
    end_item(*request, Status::kFault, last_error_);
  }
  std::erase_if(requests_, [](const auto& request) { return request->kind != Kind::kCleanup; });
  for (Item& item : take_waiting()) {
    counts_.refused.fetch_add(1, std::memory_order_relaxed);
    item.finish(item.stopped().value_or(Status::kFault), last_error_);
  }
  count_window();
}

// Another connection fell silent, and perhaps the server with it. Where a reply is due it will tell: until it
// does, nothing more is asked here. Where none is, nothing would tell but the PING of another dial.
void RespConnection::look_after_doubt(Clock::time_point now) {
  count_up(false);
  last_error_ = settings_.endpoint.name() + ": the server does not answer in time";
  if (awaiting()) return;
  hang_up();
  next_dial_ = now;
  fail_all();
  dial(now);
}

void RespConnection::count_up(bool up) {
  if (std::exchange(up_, up) == up) return;
  if (up) {
    node_->up.fetch_add(1);
    counts_.up.fetch_add(1, std::memory_order_relaxed);
  } else {
    node_->up.fetch_sub(1);
    counts_.up.fetch_sub(1, std::memory_order_relaxed);
  }
}

void RespConnection::hang_up() {
  dial_.reset();
  if (!socket_) return;
  socket_.reset();
  count_up(false);
  counts_.disconnections.fetch_add(1, std::memory_order_relaxed);
}

// Gives the connection up with all that is on it: its replies can no longer be told apart. What was not yet
// sent waits for the next one.
void RespConnection::lose(Cause cause, std::string_view why) {
  hang_up();
  // Before any item ends: who sees one end, and asks again, finds the other connections warned.
  if (cause == Cause::kSilence) node_->doubts.fetch_add(1);
  last_error_ = settings_.endpoint.name() + ": " + std::string(why);
  std::deque<std::unique_ptr<Request>> lost;
  lost.swap(requests_);
  for (auto& request : lost) {
    if (!request->on_the_wire()) {
      requests_.push_back(std::move(request));
    } else if (request->kind == Kind::kCleanup) {
      // A damaged record still has to go.
      end_item(*request, Status::kMiss, {});
      again(std::move(request));
    } else if (request->item && cause == Cause::kOurselves && request->kind != Kind::kDelete &&
               !request->item->stopped()) {
      // Sending it again changes nothing, except how many a deletion finds.
      again(std::move(request));
    } else {
      end_item(*request, Status::kFault, last_error_);
    }
  }
  count_window();
  if (cause == Cause::kOurselves) return;
  topology_.doubt();
  if (cause == Cause::kSilence) ++attempts_;
  if (attempts_ == 0) {
    next_dial_ = Clock::now();
    ++attempts_;
  } else {
    back_off();
    ++attempts_;
  }
}

void RespConnection::again(std::unique_ptr<Request> request) {
  auto fresh = std::make_unique<Request>();
  fresh->kind = request->kind;
  if (request->item) fresh->item.emplace(std::move(*request->item));
  fresh->deadline = request->deadline;
  fresh->head = std::move(request->head);
  fresh->body = request->body;
  fresh->end_made = request->kind != Kind::kPut;
  fresh->answerable[0] = request->answerable[0];
  fresh->into = request->into;
  fresh->into_tail = request->into_tail;
  fresh->asking = request->asking;
  fresh->hops = request->hops;
  requests_.push_back(std::move(fresh));
}

void RespConnection::end_all(std::string_view why) {
  for (const auto& request : requests_) end_item(*request, Status::kFault, std::string(why));
  requests_.clear();
  for (Item& item : take_waiting()) item.finish(item.stopped().value_or(Status::kFault), std::string(why));
  count_window();
}

// An item that was stopped says so, whatever else befell it.
void RespConnection::end_item(Request& request, Status status, std::string words) {
  if (!request.item) return;
  const auto stopped = request.item->stopped();
  if (stopped && status == Status::kFault) {
    request.item->finish(*stopped);
  } else {
    request.item->finish(status, std::move(words));
  }
  request.item.reset();
}

// ---- requests

void RespConnection::push(Item&& taken) {
  is_wanted_ = true;
  if (refuses()) {
    counts_.refused.fetch_add(1, std::memory_order_relaxed);
    return taken.finish(Status::kFault, last_error_);
  }
  if (has_room() && waiting_.empty()) return begin(std::move(taken));
  if (waiting_.size() >= kMaxWaiting) {
    return taken.finish(Status::kFault, settings_.endpoint.name() + ": the server does not answer");
  }
  waiting_nbytes_ += cost_of(taken);
  next_deadline_ = std::min(next_deadline_, taken.deadline());
  waiting_.push_back(std::move(taken));
}

void RespConnection::begin_waiting() {
  while (!waiting_.empty() && has_room()) {
    waiting_nbytes_ -= cost_of(waiting_.front());
    begin(std::move(waiting_.front()));
    waiting_.pop_front();
  }
}

std::deque<Item> RespConnection::take_waiting() {
  waiting_nbytes_ = 0;
  return std::exchange(waiting_, {});
}

void RespConnection::begin(Item&& taken) {
  auto request = std::make_unique<Request>();
  switch (taken.op()) {
    case Op::kPut:
      request->kind = Kind::kPut;
      break;
    case Op::kGet:
      request->kind = Kind::kGet;
      break;
    case Op::kContains:
      request->kind = Kind::kContains;
      break;
    case Op::kDelete:
      request->kind = Kind::kDelete;
      break;
    case Op::kTouch:
    case Op::kPutAbsent:
      request->kind = touches_ ? Kind::kTouch : Kind::kContains;
      break;
  }
  request->deadline = taken.deadline();
  request->item.emplace(std::move(taken));
  request->compose();
  add(std::move(request));
}

void RespConnection::push_redirected(std::unique_ptr<Request> request) {
  is_wanted_ = true;
  if (refuses()) return end_item(*request, Status::kFault, last_error_);
  add(std::move(request));
}

void RespConnection::end_redirected(Redirect&& redirect, std::string words) {
  end_item(*redirect.request, Status::kFault, std::move(words));
}

void RespConnection::add(std::unique_ptr<Request> request) {
  request->cost_left = request->cost();
  in_flight_nbytes_ += request->cost_left;
  if (requests_.empty()) moved_at_ = Clock::now();
  next_deadline_ = std::min(next_deadline_, request->deadline);
  requests_.push_back(std::move(request));
}

void RespConnection::pay(Request& request, std::size_t nbytes) {
  const std::size_t paid = std::min(nbytes, request.cost_left);
  request.cost_left -= paid;
  in_flight_nbytes_ -= paid;
}

// After requests_ was changed as a whole, with nothing on the wire.
void RespConnection::count_window() {
  first_unsent_ = 0;
  in_flight_nbytes_ = 0;
  next_deadline_ = Clock::time_point::max();
  for (const auto& request : requests_) {
    request->cost_left = request->cost();
    in_flight_nbytes_ += request->cost_left;
    next_deadline_ = std::min(next_deadline_, request->deadline);
  }
  for (const Item& item : waiting_) next_deadline_ = std::min(next_deadline_, item.deadline());
}

// While something moves, a server is slow and not silent, whatever becomes of one item's time: nothing has to have
// moved for half of what the item was given.
bool RespConnection::is_silent(const Request& request, Clock::time_point now) const {
  return now - moved_at_ >= request.item->timeout() / 2;
}

// Its buffer is let go of; what comes for it goes nowhere. False: the connection has to end for that.
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
    const auto stopped = request->item ? request->item->stopped() : std::nullopt;
    const bool is_over = !request->item && now >= request->deadline;
    if (!request->on_the_wire() && (stopped || is_over)) {
      if (stopped) end_item(*request, *stopped, {});
      if (is_over || request->kind != Kind::kCleanup) {
        pay(*request, request->cost_left);
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
  std::deque<Item> still_waiting;
  for (Item& item : take_waiting()) {
    if (const auto stopped = item.stopped()) {
      item.finish(*stopped);
      continue;
    }
    waiting_nbytes_ += cost_of(item);
    next_deadline_ = std::min(next_deadline_, item.deadline());
    still_waiting.push_back(std::move(item));
  }
  waiting_ = std::move(still_waiting);
  if (silent) {
    lose(Cause::kSilence, "the server does not answer in time");
  } else if (torn) {
    lose(Cause::kOurselves, "a put was cancelled in the middle");
  }
}

// ---- sending

bool RespConnection::send_some() {
  if (first_unsent_ == requests_.size() && !socket_.owes()) return false;
  iovec parts[kMaxParts];
  std::size_t count = 0;
  std::size_t nbytes = 0;
  for (std::size_t i = first_unsent_; i < requests_.size(); ++i) {
    if (count + 4 > kMaxParts || nbytes >= kChunkNbytes) break;
    if (!gather(*requests_[i], parts, count, nbytes)) break;
  }
  const Stream::Result result = socket_.send({parts, count});
  is_full_ = result.state == Stream::State::kBlocked || result.nbytes < nbytes;
  if (result.state == Stream::State::kBlocked) return false;
  if (result.state != Stream::State::kMoved) {
    const std::string why = socket_.error();
    // What the server said before it closed may still be there to be read.
    if (!awaiting() || !receive_some()) {
      if (socket_) lose(Cause::kServer, why);
    }
    return true;
  }
  advance(result.nbytes);
  return true;
}

// Adds what is next to be sent of a request, hashing at most one chunk ahead. False: there is more of it.
bool RespConnection::gather(Request& request, iovec* parts, std::size_t& count, std::size_t& nbytes) const {
  const auto add_part = [&](const void* data, std::size_t size) {
    if (size == 0) return;
    parts[count++] = {const_cast<void*>(data), size};
    nbytes += size;
  };
  std::size_t at = request.sent;
  if (at < request.head.size()) {
    add_part(request.head.data() + at, request.head.size() - at);
    at = request.head.size();
  }
  if (request.kind != Kind::kPut) return true;
  at -= request.head.size();
  if (at < request.body.size()) {
    const std::size_t until = std::min(request.body.size(), at + kChunkNbytes);
    if (request.item) hash_up_to(request, until);
    add_part(request.item ? request.body.data() + at : kZeros.data(), until - at);
    if (until < request.body.size()) return false;
    at = request.body.size();
  }
  if (!request.end_made) make_end(request);
  at -= request.body.size();
  add_part(request.end.data() + at, request.end.size() - at);
  return true;
}

void RespConnection::hash_up_to(Request& request, std::size_t until) {
  if (!request.checksum) {
    const Item& item = *request.item;
    request.checksum.emplace(make_header(item.key(), item.buffer().size()));
  }
  if (request.hashed >= until) return;
  request.checksum->update(request.body.subspan(request.hashed, until - request.hashed));
  request.hashed = until;
}

void RespConnection::make_end(Request& request) const {
  if (!request.item) return request.make_end(std::nullopt, request.key_text, settings_.ttl);
  const Item& item = *request.item;
  const std::span<const std::byte> tail = item.buffer().subspan(request.body.size());
  hash_up_to(request, request.body.size());  // also when there is no body
  request.checksum->update(tail);
  RecordHeader header = make_header(item.key(), item.buffer().size());
  header.checksum = request.checksum->digest();
  std::string h(kRecordHeaderNbytes + tail.size(), '\0');
  std::memcpy(h.data(), &header, sizeof header);
  if (!tail.empty()) std::memcpy(h.data() + sizeof header, tail.data(), tail.size());
  request.make_end(h, item.key().text, settings_.ttl);
}

void RespConnection::advance(std::size_t nbytes) {
  while (nbytes != 0) {
    Request& request = *requests_[first_unsent_];
    const std::size_t left = request.total_nbytes() - request.sent;
    const std::size_t now = std::min(left, nbytes);
    request.sent += now;
    nbytes -= now;
    if (request.kind == Kind::kPut) pay(request, std::min(now, request.cost_left - kRequestNbytes));
    if (!request.is_sent()) return;
    ++first_unsent_;
  }
}

}  // namespace kvpool
