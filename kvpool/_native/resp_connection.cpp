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

// A server makes every pipelined reply before it writes: unbounded pipelines halve its speed (1.5 against 3.2
// GB/s of 2 MiB GETs, Redis 7.0.15). Bytes that have arrived no longer count, so the next request is on its
// way when a large reply ends.
constexpr std::size_t kWindowNbytes = 1 << 20;
constexpr std::size_t kRequestNbytes = 128;  // what a request counts on top of its payload
constexpr std::size_t kMaxRequests = 4096;
constexpr std::size_t kMaxParts = 64;  // of one sendmsg
// Smaller values are received with the replies around them and copied: that costs less than a system call.
constexpr std::size_t kDirectNbytes = 4096;
// A value of a wrong length is read to its end and thrown away up to here; beyond it, dialling anew is
// cheaper.
constexpr std::uint64_t kMaxDrainNbytes = 64 << 20;
// For a reply that nobody waits for any more, and for the deletion of a damaged record.
constexpr auto kPatience = 5s;
constexpr auto kFirstBackoff = 10ms;
constexpr auto kMaxBackoff = 1000ms;

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

}  // namespace

RespConnection::RespConnection(RespNode& node, RespCounts& counts, std::vector<SocketAddress> addresses,
                               std::span<std::byte> scratch, unsigned seed)
    : node_(node),
      counts_(counts),
      settings_(node.settings),
      addresses_(std::move(addresses)),
      scratch_(scratch),
      random_(seed) {}

bool RespConnection::has_room() const {
  return socket_ && in_flight_nbytes_ < kWindowNbytes && requests_.size() < kMaxRequests;
}

bool RespConnection::move() {
  if (!socket_) return false;
  bool moved = send_some();
  if (socket_ && (readable_ || awaiting() || socket_.has_pending())) moved |= receive_some();
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
  if (socket_) return next_deadline_;
  return std::min(next_deadline_, dial_ ? dial_->wake_at() : next_dial_);
}

void RespConnection::came(short events) {
  readable_ = socket_ && (events & (POLLIN | POLLHUP | POLLERR)) != 0;
}

// ---- connection

bool RespConnection::dial(Clock::time_point now) {
  if (socket_) return true;
  if (!dial_) {
    if (now < next_dial_) return false;
    if (attempts_ > 1) resolve_again();
    dial_.emplace(settings_, addresses_, now);
  }
  switch (dial_->step(now)) {
    case Dial::State::kUnderWay:
      return false;
    case Dial::State::kReady:
      socket_ = dial_->take();
      dial_.reset();
      parser_.reset();
      readable_ = false;
      failing_ = false;
      node_.up.fetch_add(1);
      counts_.up.fetch_add(1, std::memory_order_relaxed);
      counts_.connections.fetch_add(1, std::memory_order_relaxed);
      return true;
    case Dial::State::kFailed:
      last_error_ = dial_->error();
      dial_.reset();
      counts_.failed_dials.fetch_add(1, std::memory_order_relaxed);
      ++attempts_;
      back_off();
      return false;
  }
  return false;
}

// A name may stand for another address by now. The resolver blocks, so it is asked only when the server is
// gone.
void RespConnection::resolve_again() {
  try {
    addresses_ = resolve(settings_.endpoint);
  } catch (const Unreachable& error) {
    last_error_ = error.what();
  }
}

void RespConnection::back_off() {
  const unsigned doublings = std::min(attempts_ - 1, 10U);
  const auto longest = std::min<Clock::duration>(kFirstBackoff * (1U << doublings), kMaxBackoff);
  const double share = std::uniform_real_distribution<double>(0.5, 1.0)(random_);
  next_dial_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(longest * share);
  failing_ = true;
  for (const auto& request : requests_) end_item(*request, Status::kFault, last_error_);
  std::erase_if(requests_, [](const auto& request) { return request->kind != Kind::kCleanup; });
  count_window();
}

void RespConnection::hang_up() {
  dial_.reset();
  if (!socket_) return;
  socket_.reset();
  node_.up.fetch_sub(1);
  counts_.up.fetch_sub(1, std::memory_order_relaxed);
  counts_.disconnections.fetch_add(1, std::memory_order_relaxed);
}

// Gives the connection up with all that is on it: its replies can no longer be told apart. What was not yet
// sent waits for the next one.
void RespConnection::lose(Cause cause, std::string_view why) {
  hang_up();
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
  requests_.push_back(std::move(fresh));
}

void RespConnection::end_all(std::string_view why) {
  for (const auto& request : requests_) end_item(*request, Status::kFault, std::string(why));
  requests_.clear();
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
  if (refuses()) return taken.finish(Status::kFault, last_error_);
  auto request = std::make_unique<Request>();
  request->item.emplace(std::move(taken));
  const Item& item = *request->item;
  const std::string& key = item.key().text;
  request->deadline = item.deadline();
  const std::size_t tail =
      std::min(item.op() == Op::kPut || item.op() == Op::kGet ? item.buffer().size() : 0, kRespTailNbytes);
  switch (item.op()) {
    case Op::kPut: {
      request->kind = Kind::kPut;
      request->body = item.buffer().first(item.buffer().size() - tail);
      request->head = "*6\r\n$4\r\nHSET\r\n$" + std::to_string(key.size()) + "\r\n" + key +
                      "\r\n$1\r\nb\r\n$" + std::to_string(request->body.size()) + "\r\n";
      break;
    }
    case Op::kGet:
      request->kind = Kind::kGet;
      request->into = item.buffer().first(item.buffer().size() - tail);
      request->into_tail = item.buffer().last(tail);
      append_command(request->head, {"HMGET", key, "h", "b"});
      break;
    case Op::kContains:
      request->kind = Kind::kContains;
      append_command(request->head, {"EXISTS", key});
      break;
    case Op::kDelete:
      request->kind = Kind::kDelete;
      append_command(request->head, {"UNLINK", key});
      break;
  }
  request->end_made = request->kind != Kind::kPut;
  add(std::move(request));
}

void RespConnection::add(std::unique_ptr<Request> request) {
  request->cost_left = kRequestNbytes + request->body.size() + request->into.size();
  in_flight_nbytes_ += request->cost_left;
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
  if (!std::exchange(request.expires, true)) return;
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
  append_command(request->head, {"UNLINK", damaged.item->key().text});
  request->end_made = true;
  request->deadline = Clock::now() + kPatience;
  request->item.emplace(std::move(*damaged.item));
  damaged.item.reset();
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

}  // namespace kvpool
