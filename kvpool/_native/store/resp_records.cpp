// Received records, and the deletion of damaged ones: part of RespConnection, see resp_connection.h.
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

}  // namespace

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
    if (request.checksum->digest() == header.checksum) return end_front(Status::kOk, {});
    request.damage = Damage::kChecksum;
  }
  clean_up(request);
  end_front(Status::kMiss, {});
}

// Counts a damaged record and deletes it. Its item is a miss afterwards, so that its caller does not find the
// record again. A good record written meanwhile is also lost: a further miss, never a wrong byte.
void RespConnection::clean_up(Request& damaged) {
  counts_.damaged[static_cast<std::size_t>(damaged.damage)].fetch_add(1, std::memory_order_relaxed);
  auto request = std::make_unique<Request>();
  request->kind = Kind::kCleanup;
  request->item.emplace(std::move(*damaged.item));
  damaged.item.reset();
  request->deadline = Clock::now() + kRespPatience;
  request->asking = damaged.asking;
  request->compose();
  add(std::move(request));
}

}  // namespace kvpool
