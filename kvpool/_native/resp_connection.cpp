#include "resp_connection.h"

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <system_error>
#include <utility>

namespace kvpool {
namespace {

using namespace std::chrono_literals;
using Kind = RespRequest::Kind;
using Stage = RespRequest::Stage;
using Sink = RespRequest::Sink;

// A server makes every pipelined reply before it writes: unbounded pipelines halve its speed (1.5 against 3.2
// GB/s of 2 MiB GETs, Redis 7.0.15). Bytes that have arrived no longer count, so the next request is on its
// way when a large reply ends.
constexpr std::size_t kWindowNbytes = 1 << 20;
constexpr std::size_t kRequestNbytes = 128;  // what a request counts on top of its payload
constexpr std::size_t kMaxRequests = 4096;
// What may wait for the window of one server; beyond it the lane waits, and so do all its servers: each takes
// its items in their order, and the lanes share them evenly.
constexpr std::size_t kWaitingNbytes = 8 << 20;
// But for a server that did not move a byte for so long, though it was asked to, the others do not wait. Its items
// do, each until its deadline: the server may only be slow.
constexpr auto kQuiet = 250ms;
constexpr std::size_t kMaxWaiting = 65536;
// A key's slot moves from one server to one other; more hops mean that the servers do not agree.
constexpr unsigned kMaxHops = 5;
constexpr std::size_t kMaxParts = 64;  // of one sendmsg
// Smaller values are received with the replies around them and copied: that costs less than a system call.
constexpr std::size_t kDirectNbytes = 4096;
// A value of a wrong length is read to its end and thrown away up to here; beyond it, dialling anew is
// cheaper.
constexpr std::uint64_t kMaxDrainNbytes = 64 << 20;
// For a reply that nobody waits for any more, and for the deletion of a damaged record.
constexpr auto kPatience = 5s;
constexpr auto kFirstBackoff = 10ms;
// A pause and an attempt together stay below a second: so soon is a server that came back used again.
constexpr auto kMaxBackoff = 400ms;
constexpr auto kConnectPatience = 500ms;
// For a first attempt to dial again; then requests do not wait for it any more.
constexpr auto kDialGrace = 250ms;

constexpr const char* kUnexpected = "its reply does not fit what it was asked";

std::string_view first_word(std::string_view words) { return words.substr(0, words.find(' ')); }

// Errors of one command, after which the connection goes on as before.
bool understood(std::string_view word) {
  constexpr std::string_view kWords[] = {"OOM",        "WRONGTYPE",   "NOPERM",   "NOAUTH",     "LOADING",
                                         "BUSY",       "MISCONF",     "READONLY", "MOVED",      "ASK",
                                         "NOREPLICAS", "CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN", "CROSSSLOT"};
  return std::find(std::begin(kWords), std::end(kWords), word) != std::end(kWords);
}

std::size_t digits(std::uint64_t value) {
  std::size_t count = 1;
  for (; value >= 10; value /= 10) ++count;
  return count;
}

// "$123\r\n"
std::size_t bulk_line_nbytes(std::uint64_t value) { return 1 + digits(value) + 2; }

std::size_t cost_of(const Item& item) {
  const bool moves_bytes = item.op() == Op::kPut || item.op() == Op::kGet;
  return kRequestNbytes + (moves_bytes ? item.buffer().size() : 0);
}

}  // namespace

RespConnection::RespConnection(std::shared_ptr<RespNode> node, Topology& topology, RespCounts& counts,
                               std::span<std::byte> scratch, unsigned seed)
    : node_(std::move(node)),
      topology_(topology),
      counts_(counts),
      settings_(node_->settings),
      addresses_(node_->addresses()),
      scratch_(scratch),
      random_(seed) {}

RespConnection::~RespConnection() { hang_up(); }

bool RespConnection::awaiting() const { return !requests_.empty() && requests_.front()->on_the_wire(); }

bool RespConnection::is_quiet(Clock::time_point now) const {
  return (!socket_ || !requests_.empty()) && now - heard_at_ >= kQuiet;
}

bool RespConnection::is_clogged(Clock::time_point now) const {
  return waiting_nbytes_ >= kWaitingNbytes && !is_quiet(now);
}

bool RespConnection::has_room() const {
  return up_ && in_flight_nbytes_ < kWindowNbytes && requests_.size() < kMaxRequests;
}

bool RespConnection::move(Clock::time_point now) {
  if (!socket_) return false;
  begin_waiting();
  bool moved = send_some();
  if (socket_ && (readable_ || awaiting() || socket_.has_pending())) moved |= receive_some();
  if (moved) heard_at_ = now;
  return moved;
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
    until = std::min(until, heard_at_ + kQuiet);
  if (socket_) return until;
  if (!dial_) return std::min(until, next_dial_);
  if (!failing_) until = std::min(until, dialled_at_ + kDialGrace);
  return std::min(until, dial_->wake_at());
}

void RespConnection::came(short events) {
  readable_ = socket_ && (events & (POLLIN | POLLHUP | POLLERR)) != 0;
}

// ---- connection

void RespConnection::keep_up(Clock::time_point now) {
  if (!socket_) dial(now);
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
    dial_.emplace(settings_, addresses_, now, kConnectPatience);
  }
  switch (dial_->step(now)) {
    case Dial::State::kUnderWay:
      if (!failing_ && now >= dialled_at_ + kDialGrace) fail_all();
      return;
    case Dial::State::kReady:
      socket_ = dial_->take();
      dial_.reset();
      parser_.reset();
      readable_ = false;
      failing_ = false;
      heard_at_ = now;
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
      request->kind = Kind::kTouch;
      break;
  }
  request->deadline = taken.deadline();
  request->item.emplace(std::move(taken));
  request->compose();
  add(std::move(request));
}

void RespConnection::push_redirected(std::unique_ptr<Request> request) {
  if (refuses()) return end_item(*request, Status::kFault, last_error_);
  add(std::move(request));
}

void RespConnection::end_redirected(Redirect&& redirect, std::string words) {
  end_item(*redirect.request, Status::kFault, std::move(words));
}

void RespConnection::add(std::unique_ptr<Request> request) {
  request->cost_left = kRequestNbytes + request->body.size() + request->into.size();
  in_flight_nbytes_ += request->cost_left;
  if (requests_.empty()) heard_at_ = Clock::now();
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
    request->cost_left = kRequestNbytes + request->body.size() + request->into.size();
    in_flight_nbytes_ += request->cost_left;
    next_deadline_ = std::min(next_deadline_, request->deadline);
  }
  for (const Item& item : waiting_) next_deadline_ = std::min(next_deadline_, item.deadline());
}

void RespConnection::give_up_stopped(Clock::time_point now) {
  bool silent = false;
  bool torn = false;
  next_deadline_ = Clock::time_point::max();
  for (auto& request : requests_) {
    if (request->item) {
      const auto stopped = request->item->stopped();
      if (stopped && !request->on_the_wire()) {
        end_item(*request, *stopped, {});
        if (request->kind != Kind::kCleanup) {
          pay(*request, request->cost_left);
          request.reset();
          continue;
        }
      } else if (stopped == Status::kTimedOut) {
        silent = true;
      } else if (stopped && request->kind == Kind::kPut && !request->is_sent()) {
        torn = true;
      } else if (stopped) {
        end_item(*request, *stopped, {});
        request->deadline = std::min(request->deadline, now + kPatience);
      }
    } else if (now >= request->deadline) {
      if (request->on_the_wire()) {
        silent = true;
      } else {
        pay(*request, request->cost_left);
        request.reset();
        continue;
      }
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
    if (count + 3 > kMaxParts || nbytes >= kChunkNbytes) break;
    if (!gather(*requests_[i], parts, count, nbytes)) break;
  }
  const Stream::Result result = socket_.send({parts, count});
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
    hash_up_to(request, std::min(request.body.size(), at + kChunkNbytes));
    add_part(request.body.data() + at, request.hashed - at);
    if (request.hashed < request.body.size()) return false;
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
  const Item& item = *request.item;
  const std::span<const std::byte> tail = item.buffer().subspan(request.body.size());
  hash_up_to(request, request.body.size());  // also when there is no body
  request.checksum->update(tail);
  RecordHeader header = make_header(item.key(), item.buffer().size());
  header.checksum = request.checksum->digest();
  std::string h(kRecordHeaderNbytes + tail.size(), '\0');
  std::memcpy(h.data(), &header, sizeof header);
  if (!tail.empty()) std::memcpy(h.data() + sizeof header, tail.data(), tail.size());
  request.end = "\r\n$1\r\nh\r\n$" + std::to_string(h.size()) + "\r\n" + h + "\r\n";
  if (request.asking) request.end += kAsking;
  append_command(request.end, {"PEXPIRE", item.key().text, std::to_string(settings_.ttl.count())});
  request.end_made = true;
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

// ---- receiving

bool RespConnection::receive_some() {
  readable_ = false;
  iovec parts[2];
  std::size_t count = 0;
  std::size_t direct = 0;
  Request* front = requests_.empty() ? nullptr : requests_.front().get();
  if (front != nullptr && parser_.bulk_left() != 0 && front->sink == Sink::kBody && front->item) {
    direct = static_cast<std::size_t>(std::min<std::uint64_t>(parser_.bulk_left(), kChunkNbytes));
    parts[count++] = {front->into.data() + front->body_got, direct};
  }
  if (direct == parser_.bulk_left() || direct == 0) {
    parts[count++] = {scratch_.data(), wanted_nbytes(direct != 0)};
  }
  const Stream::Result result = socket_.receive({parts, count});
  if (result.state != Stream::State::kMoved) {
    if (result.state != Stream::State::kBlocked) lose(Cause::kServer, std::string(socket_.error()));
    return false;
  }
  if (!up_) {
    seen_doubts_ = node_->doubts.load();
    count_up(true);
  }
  const std::size_t got = result.nbytes;
  const std::size_t straight = std::min(got, direct);
  if (straight != 0) body_came(*front, straight);
  std::string why = understand({scratch_.data(), got - straight});
  if (!why.empty()) lose(Cause::kServer, why);
  return true;
}

// How much of what comes may go through the scratch buffer: up to where the next large payload should
// begin.
std::size_t RespConnection::wanted_nbytes(bool in_body) const {
  if (requests_.empty()) return 1;  // nothing is due: one byte is proof enough
  const Request& front = *requests_.front();
  if (front.kind == Kind::kGet && (!front.item || front.damage != Damage::kNone)) return scratch_.size();
  std::size_t wanted = in_body ? 2 : 0;
  for (std::size_t i = in_body ? 1 : 0; i < requests_.size() && wanted < scratch_.size(); ++i) {
    const Request& request = *requests_[i];
    if (request.asking) wanted += request.kind == Kind::kPut ? 10 : 5;
    if (request.kind != Kind::kGet) {
      wanted += request.kind == Kind::kPut ? 8 : 4;
      continue;
    }
    const std::size_t h_nbytes = kRecordHeaderNbytes + request.into_tail.size();
    wanted += 4 + bulk_line_nbytes(h_nbytes) + h_nbytes + 2 + bulk_line_nbytes(request.into.size());
    if (request.into.size() >= kDirectNbytes) break;
    wanted += request.into.size() + 2;
  }
  return std::clamp<std::size_t>(wanted, 1, scratch_.size());
}

// Returns why the connection is in doubt; empty when it is not.
std::string RespConnection::understand(std::span<const std::byte> input) {
  while (!input.empty()) {
    if (requests_.empty() || !requests_.front()->on_the_wire()) return "it sent more than it was asked for";
    Request& front = *requests_.front();
    if (parser_.bulk_left() != 0) {
      const auto piece =
          input.first(static_cast<std::size_t>(std::min<std::uint64_t>(input.size(), parser_.bulk_left())));
      bulk_came(front, piece);
      input = input.subspan(piece.size());
      continue;
    }
    const auto token = parser_.next(input);
    if (!token) break;
    std::string why = token_came(front, *token);
    if (!why.empty()) return why;
  }
  return {};
}

void RespConnection::bulk_came(Request& request, std::span<const std::byte> piece) {
  switch (request.item ? request.sink : Sink::kNowhere) {
    case Sink::kHeader: {
      const std::size_t kept = std::min(piece.size(), request.h.size() - request.h_got);
      if (kept != 0) std::memcpy(request.h.data() + request.h_got, piece.data(), kept);
      request.h_got += kept;
      break;
    }
    case Sink::kBody:
      std::memcpy(request.into.data() + request.body_got, piece.data(), piece.size());
      body_came(request, piece.size());
      return;
    case Sink::kNowhere:
      break;
  }
  parser_.take(piece.size());
}

// `nbytes` more of b are in their place.
void RespConnection::body_came(Request& request, std::size_t nbytes) {
  request.checksum->update(request.into.subspan(request.body_got, nbytes));
  request.body_got += nbytes;
  parser_.take(nbytes);
  pay(request, std::min(nbytes, request.cost_left - kRequestNbytes));
}

std::string RespConnection::token_came(Request& request, const RespToken& token) {
  if (token.kind == RespKind::kBad) return "its reply is no RESP2, or too large";
  if (request.asking && !request.asked) {
    // Where it is refused the command is, too.
    if (token.kind != RespKind::kSimple && token.kind != RespKind::kError) return kUnexpected;
    request.asked = true;
    return {};
  }
  if (token.kind == RespKind::kError) return error_came(request, token.text);
  // A reply to what is still being sent can only be an error.
  if (!request.is_sent()) return "it replied before it was asked";
  switch (request.kind) {
    case Kind::kPut:
      return put_reply_came(request, token);
    case Kind::kGet:
      return get_token_came(request, token);
    case Kind::kContains:
    case Kind::kDelete:
    case Kind::kTouch:
    case Kind::kCleanup:
      if (token.kind != RespKind::kInteger || token.value < 0 || token.value > 1) return kUnexpected;
      end_front(token.value == 1 && request.kind != Kind::kCleanup ? Status::kOk : Status::kMiss, {});
      return {};
  }
  return kUnexpected;
}

std::string RespConnection::error_came(Request& request, std::string_view text) {
  const std::string_view word = first_word(text);
  const std::string words = settings_.endpoint.name() + ": " + settings_.shown(text);
  if (!request.is_sent() || !understood(word) || request.stage == Stage::kHeader ||
      request.stage == Stage::kBody) {
    end_item(request, Status::kFault, words);
    return "it answered: " + settings_.shown(text);
  }
  if (!topology_.is_fixed() && (word == "MOVED" || word == "ASK") && note_redirect(request, text)) {
    if (request.kind == Kind::kPut) {
      end_put_reply(request);
    } else {
      redirect_front();
    }
    return {};
  }
  if (word == "READONLY" || word == "CLUSTERDOWN" || word == "MASTERDOWN" || word == "MOVED")
    topology_.doubt();
  if (request.kind == Kind::kGet && word == "WRONGTYPE") {
    request.damage = Damage::kMagic;
    end_get(request);
    return {};
  }
  const Status status = request.kind == Kind::kPut && word == "OOM" ? Status::kNoRoom : Status::kFault;
  if (request.kind != Kind::kPut) {
    end_front(request.kind == Kind::kCleanup ? Status::kMiss : status,
              request.kind == Kind::kCleanup ? std::string() : words);
    return {};
  }
  if (request.outcome == Status::kOk) {
    request.outcome = status;
    request.words = status == Status::kFault ? words : std::string();
  }
  end_put_reply(request);
  return {};
}

std::string RespConnection::put_reply_came(Request& request, const RespToken& token) {
  if (token.kind != RespKind::kInteger) return kUnexpected;
  if (request.expires) {
    // The server kept it, and evicted it before the next command.
    if (token.value == 0 && request.outcome == Status::kOk) request.outcome = Status::kNoRoom;
    if (token.value < 0 || token.value > 1) return kUnexpected;
  } else if (token.value < 0 || token.value > 2) {
    return kUnexpected;
  }
  end_put_reply(request);
  return {};
}

void RespConnection::end_put_reply(Request& request) {
  request.asked = false;
  if (!std::exchange(request.expires, true)) return;
  if (request.moved_port != 0) return redirect_front();
  end_front(request.outcome, std::move(request.words));
}

std::string RespConnection::get_token_came(Request& request, const RespToken& token) {
  switch (request.stage) {
    case Stage::kStart:
      if (token.kind != RespKind::kArray || token.value != 2) return kUnexpected;
      request.stage = Stage::kHeader;
      return {};
    case Stage::kHeader:
      if (token.kind == RespKind::kBulk) {
        request.h_nbytes = static_cast<std::uint64_t>(token.value);
        if (request.h_nbytes > kMaxDrainNbytes) return too_large(request);
        request.sink = Sink::kHeader;
        return {};
      }
      if (token.kind == RespKind::kNil) {
        request.h_is_nil = true;
      } else if (token.kind != RespKind::kBulkEnd) {
        return kUnexpected;
      } else {
        check_h(request);
      }
      request.sink = Sink::kNowhere;
      request.stage = Stage::kBody;
      return {};
    case Stage::kBody:
      if (token.kind == RespKind::kBulk) return body_begins(request, static_cast<std::uint64_t>(token.value));
      if (token.kind == RespKind::kNil) {
        if (request.h_is_nil) {
          end_front(Status::kMiss, {});
          return {};
        }
        if (request.damage == Damage::kNone) request.damage = Damage::kLength;
      } else if (token.kind != RespKind::kBulkEnd) {
        return kUnexpected;
      }
      end_get(request);
      return {};
  }
  return kUnexpected;
}

// All of h is there: is it the header of what was asked for?
void RespConnection::check_h(Request& request) {
  if (!request.item) return;
  if (request.h_nbytes < kRecordHeaderNbytes) {
    request.damage = Damage::kTruncated;
    return;
  }
  RecordHeader header;
  std::memcpy(&header, request.h.data(), sizeof header);
  const Item& item = *request.item;
  request.damage = check_header(header, item.key(), item.buffer().size());
  if (request.damage == Damage::kNone && request.h_nbytes != kRecordHeaderNbytes + request.into_tail.size()) {
    request.damage = Damage::kLength;
  }
  if (request.damage == Damage::kNone) request.checksum.emplace(header);
}

std::string RespConnection::body_begins(Request& request, std::uint64_t nbytes) {
  if (request.h_is_nil) request.damage = Damage::kTruncated;
  if (request.damage == Damage::kNone && nbytes != request.into.size()) request.damage = Damage::kLength;
  const bool good = request.item && request.damage == Damage::kNone;
  request.sink = good ? Sink::kBody : Sink::kNowhere;
  return good || nbytes <= kMaxDrainNbytes ? std::string() : too_large(request);
}

std::string RespConnection::too_large(Request& request) {
  if (request.damage == Damage::kNone) request.damage = Damage::kLength;
  if (request.item) clean_up(request);
  return "a record that is too large to be read to its end";
}

// The whole reply to a get has come.
void RespConnection::end_get(Request& request) {
  if (!request.item) return end_front(Status::kMiss, {});  // nobody waits for it
  if (request.damage == Damage::kNone) {
    RecordHeader header;
    std::memcpy(&header, request.h.data(), sizeof header);
    if (!request.into_tail.empty()) {
      std::memcpy(request.into_tail.data(), request.h.data() + sizeof header, request.into_tail.size());
      request.checksum->update(request.into_tail);
    }
    if (request.checksum->digest() == header.checksum) return end_front(Status::kOk, {});
    request.damage = Damage::kChecksum;
  }
  clean_up(request);
  end_front(Status::kMiss, {});
}

// Counts a damaged record and has it deleted. Its item is a miss once that is done, so that whoever sees
// the miss does not find the record again. A good one that is written just now goes with it: a miss more,
// never a wrong byte.
void RespConnection::clean_up(Request& damaged) {
  counts_.damaged[static_cast<std::size_t>(damaged.damage)].fetch_add(1, std::memory_order_relaxed);
  auto request = std::make_unique<Request>();
  request->kind = Kind::kCleanup;
  request->item.emplace(std::move(*damaged.item));
  damaged.item.reset();
  request->deadline = Clock::now() + kPatience;
  request->asking = damaged.asking;
  request->compose();
  add(std::move(request));
}

void RespConnection::end_front(Status status, std::string words) {
  Request& front = *requests_.front();
  attempts_ = 0;  // this connection is good for something
  if (front.item) {
    front.item->finish(status, std::move(words));
    front.item.reset();
  }
  pay(front, front.cost_left);
  requests_.pop_front();
  --first_unsent_;
}

// "MOVED 3999 10.0.0.1:6381", or ASK: a host may be empty (the same one) or an IPv6 address. False: it makes no
// sense, or the request was sent from server to server often enough.
bool RespConnection::note_redirect(Request& request, std::string_view text) const {
  const std::size_t space = text.rfind(' ');
  const std::size_t colon = text.rfind(':');
  if (colon == std::string_view::npos || colon < space) return false;
  const std::string_view host = text.substr(space + 1, colon - space - 1);
  unsigned port = 0;
  const char* const end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data() + colon + 1, end, port);
  if (error != std::errc() || at != end || port < 1 || port > 65535) return false;
  if (!host.empty() && !is_host(host)) return false;
  if (request.hops >= kMaxHops) return false;
  // Both halves of a put say the same; where they differ, the one for good counts.
  const bool asking = text.starts_with("ASK");
  if (request.moved_port != 0 && asking) return true;
  request.moved_host = host.empty() ? settings_.endpoint.host : std::string(host);
  request.moved_port = port;
  request.moved_asking = asking;
  return true;
}

void RespConnection::redirect_front() {
  attempts_ = 0;
  std::unique_ptr<Request> front = std::move(requests_.front());
  pay(*front, front->cost_left);
  requests_.pop_front();
  --first_unsent_;
  (front->moved_asking ? counts_.asked : counts_.moved).fetch_add(1, std::memory_order_relaxed);
  // A slot on its way from one server to another stays ours until it has arrived.
  if (!front->moved_asking) topology_.doubt();
  if (!front->item) return;  // nobody waits for it
  auto fresh = std::make_unique<Request>();
  fresh->kind = front->kind;
  fresh->deadline = front->deadline;
  fresh->item.emplace(std::move(*front->item));
  fresh->asking = front->moved_asking;
  fresh->hops = front->hops + 1;
  fresh->compose();
  redirected_.push_back({std::move(fresh), std::move(front->moved_host), front->moved_port});
}

}  // namespace kvpool
