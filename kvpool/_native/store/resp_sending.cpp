// Picks the next bytes to send: part of RespConnection, see resp_connection.h.
#include <algorithm>
#include <array>
#include <cstring>

#include "store/resp_connection.h"

namespace kvpool {
namespace {

using Kind = RespRequest::Kind;

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
      if (socket_) lose(Cause::kServer, why);
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
  hash_up_to(request, request.body.size());  // also without a body
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
    if (request.kind == Kind::kPut) release_send_window(request, request.released_by(now));
    if (!request.is_sent()) return;
    ++first_unsent_;
  }
}

}  // namespace kvpool
