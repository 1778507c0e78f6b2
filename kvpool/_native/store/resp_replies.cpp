// Replies to a connection's requests: part of RespConnection, see resp_connection.h.
#include <algorithm>
#include <charconv>
#include <cstring>
#include <utility>
#include <vector>

#include "store/resp_connection.h"

namespace kvpool {
namespace {

using Kind = RespRequest::Kind;
using PutReply = RespRequest::PutReply;

// Smaller values are received with their neighbours and copied: cheaper than a system call.
constexpr std::size_t kDirectNbytes = 4096;
// A key's slot moves once; more hops mean that the servers disagree.
constexpr unsigned kMaxHops = 5;
constexpr std::size_t kOkNbytes = 5;
constexpr std::size_t kPutRepliesNbytes = 35;  // "+OK", "+QUEUED" twice, "*2" and two integers

constexpr const char* kTooEarly = "it replied before it was asked";

// An aborted transaction says behind these words why its EXEC was refused.
std::string_view reason_of(std::string_view error) {
  constexpr std::string_view kBecause = "because of: ";
  const std::size_t at = error.starts_with("EXECABORT ") ? error.find(kBecause) : std::string_view::npos;
  return at == std::string_view::npos ? error : error.substr(at + kBecause.size());
}

// Whether an error concerns the command rather than the key: no right, or unknown.
bool is_command_refused(std::string_view text) {
  const std::string_view word = first_word(text);
  return (word == "NOPERM" || word == "ERR") && text.find("command") != std::string_view::npos;
}

// Whether an error of a command with many keys may be none with one: not one of a busy or loading server.
bool is_joining_refused(std::string_view text) {
  const std::string_view word = first_word(text);
  return error_status(text) != Status::kFault || word == "ASK" || word == "MOVED" || word == "TRYAGAIN";
}

std::size_t digits(std::uint64_t value) {
  std::size_t count = 1;
  for (; value >= 10; value /= 10) ++count;
  return count;
}

// "$123\r\n"
std::size_t bulk_line_nbytes(std::uint64_t value) { return 1 + digits(value) + 2; }

}  // namespace

bool RespConnection::receive_some() {
  readable_ = false;
  iovec parts[2];
  std::size_t count = 0;
  std::size_t direct = 0;
  Request* front = requests_.empty() ? nullptr : requests_.front().get();
  if (front != nullptr && parser_.bulk_left() != 0 && front->is_kept && front->item) {
    direct = std::min(front->field_left, kChunkNbytes);
    if (direct != 0) parts[count++] = {front->into.data() + front->got, direct};
  }
  if (direct == 0 || direct == front->field_left) {
    parts[count++] = {scratch_.data(), wanted_nbytes(direct != 0)};
  }
  const Stream::Result result = socket_.receive({parts, count});
  if (result.state != Stream::State::kMoved) {
    if (result.state != Stream::State::kBlocked) end_by_server(socket_.error());
    return false;
  }
  if (!up_) {
    seen_silences_ = node_->silences.load();
    count_up(true);
  }
  const std::size_t got = result.nbytes;
  const std::size_t straight = std::min(got, direct);
  if (straight != 0) on_payload(*front, straight);
  std::string why = parse_replies({scratch_.data(), got - straight});
  if (!why.empty()) said_.empty() ? lose(Cause::kServer, why) : end_by_server(why);
  return true;
}

// Bytes to receive through the scratch buffer: up to the next large payload. `in_payload`: behind what is left of the
// payload in the present field.
std::size_t RespConnection::wanted_nbytes(bool in_payload) const {
  if (requests_.empty()) return scratch_.size();  // nothing is due, but a reason to hang up
  std::size_t wanted = 0;
  for (std::size_t i = 0; i < requests_.size() && wanted < scratch_.size(); ++i) {
    const Request& request = *requests_[i];
    if (request.asking && !request.asked) wanted += kOkNbytes;
    if (request.kind != Kind::kGet) {
      wanted += request.kind == Kind::kPut ? kPutRepliesNbytes : 3 + digits(request.keys);
      continue;
    }
    if (!request.item || request.damage != Damage::kNone) return scratch_.size();
    if (!request.has_begun) wanted += 4;
    bool is_within = in_payload && i == 0;
    for (std::size_t field = request.field; field < request.fields.count; ++field) {
      const std::size_t payload = request.fields.nbytes[field];
      const std::size_t header = field + 1 == request.fields.count ? kRecordHeaderNbytes : 0;
      if (!is_within) {
        wanted += bulk_line_nbytes(payload + header);
        if (payload >= kDirectNbytes) return std::clamp<std::size_t>(wanted, 1, scratch_.size());
        wanted += payload;
      }
      wanted += header + 2;
      is_within = false;
    }
  }
  return std::clamp<std::size_t>(wanted, 1, scratch_.size());
}

// Returns why the connection must end; empty to keep it.
std::string RespConnection::parse_replies(std::span<const std::byte> input) {
  while (!input.empty()) {
    if (requests_.empty() || !requests_.front()->on_the_wire()) {
      const auto token = parser_.next(input);
      return unasked(token.value_or(RespToken{RespKind::kBad}), "it sent more than it was asked for");
    }
    Request& front = *requests_.front();
    if (parser_.bulk_left() != 0) {
      const auto piece =
          input.first(static_cast<std::size_t>(std::min<std::uint64_t>(input.size(), parser_.bulk_left())));
      on_bulk(front, piece);
      input = input.subspan(piece.size());
      continue;
    }
    const auto token = parser_.next(input);
    if (!token) break;
    std::string why = on_token(front, *token);
    if (!why.empty()) return why;
  }
  return {};
}

// A piece of the present field: payload, and behind that of the last one the header.
void RespConnection::on_bulk(Request& request, std::span<const std::byte> piece) {
  if (!request.item || !request.is_kept) return parser_.take(piece.size());
  const auto payload = piece.first(std::min(piece.size(), request.field_left));
  if (!payload.empty()) {
    std::memcpy(request.into.data() + request.got, payload.data(), payload.size());
    on_payload(request, payload.size());
  }
  const auto header = piece.subspan(payload.size());
  if (header.empty()) return;
  std::memcpy(request.header.data() + request.header_got, header.data(), header.size());
  request.header_got += header.size();
  parser_.take(header.size());
}

// `nbytes` more of the payload are in place.
void RespConnection::on_payload(Request& request, std::size_t nbytes) {
  request.checksum->update(request.into.subspan(request.got, nbytes));
  request.got += nbytes;
  request.field_left -= nbytes;
  parser_.take(nbytes);
  release_send_window(request, request.released_by(nbytes));
}

std::string RespConnection::on_token(Request& request, const RespToken& token) {
  if (token.kind == RespKind::kBad) return "its reply is no RESP2, or too large";
  if (request.asking && !request.asked) {
    // A refusal of it also refuses the command.
    if (token.kind != RespKind::kSimple && token.kind != RespKind::kError) return kUnexpected;
    request.asked = true;
    return {};
  }
  if (request.kind == Kind::kPut) return on_put_token(request, token);
  if (!request.is_sent()) return unasked(token, kTooEarly);
  if (token.kind == RespKind::kError) return on_error(request, token.text);
  switch (request.kind) {
    case Kind::kPut:
      break;
    case Kind::kGet:
      return on_get_token(request, token);
    case Kind::kContains:
    case Kind::kDelete:
    case Kind::kTouch:
    case Kind::kExpire:
    case Kind::kCleanup:
    case Kind::kRenew:
      if (token.kind != RespKind::kInteger || token.value < 0) return kUnexpected;
      if (static_cast<std::size_t>(token.value) > request.keys) return kUnexpected;
      if (request.keys > 1) {
        end_joined(request, static_cast<std::size_t>(token.value));
        return {};
      }
      if (request.asks_before_put()) {
        if (token.value == 1) {
          end_front(Status::kPresent, {});
        } else {
          go_on(request, Kind::kPut);
        }
        return {};
      }
      end_front(token.value == 1 && request.kind != Kind::kCleanup ? Status::kOk : Status::kMiss, {});
      return {};
    case Kind::kAge:
      return on_age(request, token);
  }
  return kUnexpected;
}

// Why a reply that no command has earned ends the connection: an error says it itself.
std::string RespConnection::unasked(const RespToken& token, const char* otherwise) {
  if (token.kind == RespKind::kError) said_ = shown(token.text);
  return otherwise;
}

// A complete error reply refuses this command, and no other.
std::string RespConnection::on_error(Request& request, std::string_view text) {
  const std::string_view word = first_word(text);
  const std::string words = settings_.endpoint.name() + ": " + shown(text);
  if (request.has_begun) {
    end_item(request, Status::kFault, words);
    return "it answered: " + shown(text);
  }
  if (request.keys > 1) {
    const bool is_refused = request.kind == Kind::kTouch && is_command_refused(text);
    if (is_refused) {
      touches_ = false;
    } else if (is_joining_refused(text)) {
      joins_ = false;
    }
    ask_each(request, is_refused ? Kind::kContains : request.kind);
    return {};
  }
  switch (request.kind) {
    case Kind::kAge:
    case Kind::kRenew:
      renews_ = renews_ && word != "NOPERM" && word != "ERR";
      [[fallthrough]];
    case Kind::kCleanup:
      end_front(Status::kMiss, {});
      return {};
    case Kind::kTouch:
      if (is_command_refused(text)) {
        touches_ = false;  // from now on presence is tested by itself
        go_on(request, Kind::kContains);
        return {};
      }
      break;
    default:
      break;
  }
  if (note_refusal(request, word, text)) {
    redirect_front();
  } else if (request.kind == Kind::kGet && word == "WRONGTYPE") {
    request.damage = Damage::kMagic;
    end_get(request);
  } else {
    end_front(error_status(text), words, Blame::kStore);
  }
  return {};
}

// Reads an error about the key's owner. True: ask another server.
bool RespConnection::note_refusal(Request& request, std::string_view word, std::string_view text) {
  const bool moves = word == "MOVED" || word == "ASK";
  if (moves && !topology_.is_fixed() && note_redirect(request, text)) return true;
  if (word == "READONLY" || word == "CLUSTERDOWN" || word == "MASTERDOWN" || word == "MOVED")
    topology_.mark_stale();
  return false;
}

// The front's item sends the same server another command.
void RespConnection::go_on(Request& answered, Kind kind) {
  if (!answered.item) return end_front(Status::kMiss, {});
  auto request = std::make_unique<Request>(kind, std::move(*answered.item), settings_.ttl, answered.asking,
                                           answered.hops);
  answered.item.reset();
  end_front(Status::kMiss, {});
  add(std::move(request));
}

// MULTI, HSET, PEXPIRE and EXEC have a reply each; EXEC's contains the results of the middle two.
std::string RespConnection::on_put_token(Request& request, const RespToken& token) {
  const PutReply reply = request.put_reply;
  const auto place = static_cast<std::size_t>(reply);
  if (place < request.answerable.size() && request.sent < request.answerable[place]) {
    return unasked(token, kTooEarly);
  }
  if (token.kind == RespKind::kError) {
    on_put_error(request, token.text);
  } else if (reply == PutReply::kExec) {
    if (token.kind != RespKind::kArray || token.value != 2) return kUnexpected;
  } else if (token.kind == RespKind::kInteger && token.value >= 0 &&
             token.value <= (reply == PutReply::kPexpireDone ? 1 : static_cast<int>(request.fields.count))) {
    // A transaction would have queued it: users without the right to begin one get the result at once.
    const bool is_done = reply == PutReply::kHsetDone || reply == PutReply::kPexpireDone;
    if (!is_done && request.outcome == Status::kOk) return kUnexpected;
    if (reply == PutReply::kPexpireDone && token.value == 0 && request.outcome == Status::kOk) {
      request.outcome = Status::kNoRoom;
    }
  } else if (place > static_cast<std::size_t>(PutReply::kPexpire) || token.kind != RespKind::kSimple ||
             token.text != (reply == PutReply::kMulti ? "OK" : "QUEUED")) {
    return kUnexpected;
  }
  const bool is_last =
      reply == PutReply::kPexpireDone || (reply == PutReply::kExec && token.kind == RespKind::kError);
  request.put_reply = static_cast<PutReply>(place + 1);
  if (!is_last) return {};
  if (request.moved_port != 0) {
    redirect_front();
  } else {
    end_front(request.outcome, std::move(request.words), Blame::kStore);
  }
  return {};
}

// The first error is the reason; the others follow from it.
void RespConnection::on_put_error(Request& request, std::string_view error) {
  const std::string_view text = reason_of(error);
  const std::string_view word = first_word(text);
  if (note_refusal(request, word, text) || request.outcome != Status::kOk) return;
  // The whole put can be in the sockets when the server gives up on its begin.
  if (text.starts_with("ERR Protocol error")) said_ = shown(text);
  request.outcome = word == "OOM" ? Status::kNoRoom : error_status(text);
  if (request.outcome != Status::kNoRoom) request.words = settings_.endpoint.name() + ": " + shown(text);
}

void RespConnection::end_front(Status status, std::string words, Blame blame) {
  Request& front = *requests_.front();
  attempts_ = 0;  // this connection proved useful
  if (status != Status::kFault && status != Status::kRefused) said_.clear();
  std::unique_ptr<Request> look;
  if (front.item) {
    if (status == Status::kOk || status == Status::kPresent) look = look_at(*front.item, front.kind);
    const bool has_moved = status == Status::kOk || status == Status::kNoRoom;
    if (RefusedSize* const sizes = refused(front.kind); sizes != nullptr && has_moved) {
      sizes->moved(front.item->buffer().size());
    }
    front.item->finish(status, std::move(words), blame);
    front.item.reset();
  }
  release_send_window(front, front.cost_left);
  requests_.pop_front();
  --first_unsent_;
  if (look) add(std::move(look));
}

// "MOVED 3999 10.0.0.1:6381", or ASK: an empty host is the same server; IPv6 hosts occur. False: nonsense, or
// the request has hopped too often.
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
  // Both halves of a put agree; if they differ, the permanent redirect counts.
  const bool asking = first_word(text) == "ASK";
  if (request.moved_port != 0 && asking) return true;
  request.moved_host = host.empty() ? settings_.endpoint.host : std::string(host);
  request.moved_port = port;
  request.moved_asking = asking;
  return true;
}

void RespConnection::redirect_front() {
  attempts_ = 0;
  std::unique_ptr<Request> front = std::move(requests_.front());
  release_send_window(*front, front->cost_left);
  requests_.pop_front();
  --first_unsent_;
  (front->moved_asking ? counts_.asked : counts_.moved).fetch_add(1, std::memory_order_relaxed);
  // A migrating slot stays with its server until it has arrived.
  if (!front->moved_asking) topology_.mark_stale();
  if (!front->item) return;  // the caller has given up
  auto fresh = std::make_unique<Request>(front->kind, std::move(*front->item), settings_.ttl,
                                         front->moved_asking, front->hops + 1);
  redirected_.push_back({std::move(fresh), std::move(front->moved_host), front->moved_port});
}

}  // namespace kvpool
