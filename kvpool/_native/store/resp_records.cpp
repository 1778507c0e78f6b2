// Bytes to send, received records, and the deletion of damaged ones: part of RespConnection, see resp_connection.h.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "store/resp_connection.h"

namespace kvpool {
namespace {

using Kind = RespRequest::Kind;
using Stage = RespRequest::Stage;
using Sink = RespRequest::Sink;

// A value of a wrong length up to this is read and discarded; beyond it, a new dial is cheaper.
constexpr std::uint64_t kMaxDrainNbytes = 64 << 20;

constexpr std::size_t kMaxParts = 64;  // of one sendmsg
// Replaces the rest of a given up put.
constexpr std::array<std::byte, kChunkNbytes> kZeros{};

}  // namespace

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
    // A closing server's last words may still be readable.
    if (!awaiting() || !receive_some()) {
      if (socket_) end_by_server(why);
    }
    return true;
  }
  advance(result.nbytes);
  return true;
}

// Adds a request's next parts, hashing at most one chunk ahead. False: more of it remains.
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
    if (request.item && !request.item->checksum()) hash_up_to(request, until);
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
  RecordHeader header = make_header(item.key(), item.buffer().size());
  if (const auto known = item.checksum()) {
    header.checksum = *known;
  } else {
    hash_up_to(request, request.body.size());  // also without a body
    request.checksum->update(tail);
    header.checksum = request.checksum->digest();
  }
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
    if (request.kind == Kind::kPut) release_send_window(request, request.released_by(now));
    if (!request.is_sent()) return;
    ++first_unsent_;
  }
}

std::string RespConnection::on_get_token(Request& request, const RespToken& token) {
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
      if (token.kind == RespKind::kBulk)
        return on_body_begin(request, static_cast<std::uint64_t>(token.value));
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

// h is complete: check that its header matches the request.
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

std::string RespConnection::on_body_begin(Request& request, std::uint64_t nbytes) {
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

// The reply to a get is complete.
void RespConnection::end_get(Request& request) {
  if (!request.item) return end_front(Status::kMiss, {});  // the caller has given up
  if (request.damage == Damage::kNone) {
    RecordHeader header;
    std::memcpy(&header, request.h.data(), sizeof header);
    if (!request.into_tail.empty()) {
      std::memcpy(request.into_tail.data(), request.h.data() + sizeof header, request.into_tail.size());
      request.checksum->update(request.into_tail);
    }
    if (request.checksum->digest() == header.checksum) {
      request.item->tell({request.item->buffer().size(), header.checksum});
      return end_front(Status::kOk, {});
    }
    request.damage = Damage::kChecksum;
  }
  clean_up(request);
  end_front(Status::kMiss, {});
}

// Counts a damaged record and deletes it. Its item is a miss afterwards, so that its caller does not find the
// record again. A good record written meanwhile is also lost: a further miss, never a wrong byte.
void RespConnection::clean_up(Request& damaged) {
  counts_.damaged.add(damaged.damage);
  add(std::make_unique<Request>(Kind::kCleanup, std::move(*damaged.item), settings_.ttl, damaged.asking));
  damaged.item.reset();
}

}  // namespace kvpool
