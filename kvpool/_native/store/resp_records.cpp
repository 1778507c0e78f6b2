// Bytes to send, received records, and the deletion of damaged ones: part of RespConnection, see resp_connection.h.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "store/resp_connection.h"

namespace kvpool {
namespace {

using Kind = RespRequest::Kind;

// A value of a wrong length up to this is read and discarded; beyond it, a new dial is cheaper.
constexpr std::uint64_t kMaxDrainNbytes = 64 << 20;

constexpr std::size_t kMaxParts = 64;  // of one sendmsg
constexpr std::size_t kPartsOfRequest = 2 + 2 * kMaxRecordFields;
// Replaces the rest of a given up put.
constexpr std::array<std::byte, kChunkNbytes> kZeros{};

// Where the payload of a send of about `nbytes` ends that begins at `from`: a short rest goes along.
std::size_t send_until(const RespRequest& put, std::size_t from, std::size_t nbytes) {
  if (!put.item) return std::min(put.body.size(), from + kZeros.size());
  return from + nbytes + nbytes / 4 < put.body.size() ? from + nbytes : put.body.size();
}

}  // namespace

bool RespConnection::send_some(std::size_t most) {
  if (first_unsent_ == requests_.size() && !socket_.owes()) return false;
  iovec parts[kMaxParts];
  std::size_t count = 0;
  std::size_t nbytes = 0;
  for (std::size_t i = first_unsent_; i < requests_.size(); ++i) {
    if (count + kPartsOfRequest > kMaxParts || nbytes >= most) break;
    if (!gather(*requests_[i], most, parts, count, nbytes)) break;
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

// Adds a request's next parts, hashing their payload, of about `most` bytes. False: more of it remains.
bool RespConnection::gather(Request& request, std::size_t most, iovec* parts, std::size_t& count,
                            std::size_t& nbytes) const {
  const auto add_part = [&](const void* data, std::size_t size) {
    if (size == 0) return;
    parts[count++] = {const_cast<void*>(data), size};
    nbytes += size;
  };
  std::size_t at = request.sent;
  const auto add_text = [&](const std::string& text) {
    if (at < text.size()) add_part(text.data() + at, text.size() - at);
    at -= std::min(at, text.size());
  };
  add_text(request.head);
  if (request.kind != Kind::kPut) {
    add_text(request.end);
    return true;
  }
  std::size_t until = 0;  // of the payload
  std::size_t begin = 0;  // of a field's
  for (std::size_t i = 0; i < request.fields.count; ++i) {
    const std::size_t size = request.fields.nbytes[i];
    add_text(request.names[i]);
    if (at < size) {
      if (until == 0) until = send_until(request, begin + at, most);
      const std::size_t end = std::min(begin + size, until);
      if (request.item && !request.item->seal().checksum) hash_up_to(request, end);
      add_part(request.item ? request.body.data() + begin + at : kZeros.data(), end - begin - at);
      if (end < begin + size) return false;
    }
    at -= std::min(at, size);
    begin += size;
  }
  if (!request.end_made) make_end(request);
  add_text(request.end);
  return true;
}

void RespConnection::hash_up_to(Request& request, std::size_t until) {
  if (request.hashed >= until) return;
  request.checksum->update(request.body.subspan(request.hashed, until - request.hashed));
  request.hashed = until;
}

void RespConnection::make_end(Request& request) const {
  if (!request.item) return request.make_end(std::nullopt, request.key_text, settings_.ttl);
  const Item& item = *request.item;
  const RecordHeader header = seal_record(item.key(), request.body.size(), item.seal(), *request.checksum);
  request.make_end(header, item.key().text, settings_.ttl);
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

// HMGET's array has the record's fields in order.
std::string RespConnection::on_get_token(Request& request, const RespToken& token) {
  if (!request.has_begun) {
    if (token.kind != RespKind::kArray || token.value != static_cast<std::int64_t>(request.fields.count)) {
      return kUnexpected;
    }
    request.has_begun = true;
    return {};
  }
  switch (token.kind) {
    case RespKind::kBulk:
      return on_field(request, static_cast<std::uint64_t>(token.value));
    case RespKind::kNil:
      ++request.missing;
      [[fallthrough]];
    case RespKind::kBulkEnd:
      request.is_kept = false;
      if (++request.field == request.fields.count) end_get(request);
      return {};
    default:
      return kUnexpected;
  }
}

// A field begins: its length must be its part of the record.
std::string RespConnection::on_field(Request& request, std::uint64_t nbytes) {
  const bool is_last = request.field + 1 == request.fields.count;
  const std::uint64_t payload_nbytes = request.fields.nbytes[request.field];
  if (request.damage == Damage::kNone && nbytes != payload_nbytes + (is_last ? kRecordHeaderNbytes : 0)) {
    request.damage = is_last && nbytes < kRecordHeaderNbytes ? Damage::kTruncated : Damage::kLength;
  }
  request.is_kept = request.item && request.damage == Damage::kNone;
  request.field_left = payload_nbytes;
  if (request.is_kept || nbytes <= kMaxDrainNbytes) return {};
  if (request.damage == Damage::kNone) request.damage = Damage::kLength;
  if (request.item) clean_up(request);
  return "a record that is too large to be read to its end";
}

// The reply to a get is complete.
void RespConnection::end_get(Request& request) {
  if (!request.item || request.missing == request.fields.count) return end_front(Status::kMiss, {});
  if (request.damage == Damage::kNone && request.missing != 0) request.damage = Damage::kTruncated;
  if (request.damage == Damage::kNone) {
    RecordHeader header;
    std::memcpy(&header, request.header.data(), sizeof header);
    const Item& item = *request.item;
    request.damage = verify_record(item.key(), header, request.into.size(), *request.checksum);
    if (request.damage == Damage::kNone) {
      item.tell({request.into.size(), Seal{header.writer, header.checksum}});
      return end_front(Status::kOk, {});
    }
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
