// Composes requests.
#include "store/resp_request.h"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "store/resp_dial.h"
#include "store/resp_node.h"

namespace kvpool {
namespace {

// The rest of a given up put is sent as zeros up to this; beyond it, a new dial is cheaper.
constexpr std::size_t kMaxFillNbytes = 8 << 20;
// A connection takes this many send windows of puts ahead: with one, each window would wait for a round trip;
// with many, one I/O thread would take a batch that others could share.
constexpr std::size_t kSendWindowsAhead = 4;

// Of a command whose other words are so many keys.
std::string presence_head(RespRequest::Kind kind, std::size_t keys) {
  std::string head = "*" + std::to_string(1 + keys) + "\r\n";
  append_word(head, kind == RespRequest::Kind::kTouch ? "TOUCH" : "EXISTS");
  return head;
}

}  // namespace

RespRequest::RespRequest(Kind kind_, Item&& item_, std::chrono::milliseconds ttl, bool asking_,
                         unsigned hops_)
    : kind(kind_),
      item(std::move(item_)),
      deadline(kind_ == Kind::kCleanup ? Clock::now() + kRespPatience : item->deadline()),
      head(asking_ ? kAsking : std::string_view()),
      end_made(kind_ != Kind::kPut),
      key_text(kind_ == Kind::kCleanup ? item->key().text : std::string()),
      hops(hops_),
      asking(asking_) {
  const std::string& key = item->key().text;
  const bool moves_bytes = kind == Kind::kPut || kind == Kind::kGet;
  const auto buffer = moves_bytes ? item->buffer() : std::span<std::byte>();
  if (moves_bytes) {
    fields = cut_record(buffer.size());
    checksum = std::make_unique<RecordChecksum>();
  }
  switch (kind) {
    case Kind::kPut:
      body = buffer;
      append_command(head, {"MULTI"});
      answerable[0] = head.size();
      head += "*" + std::to_string(2 + 2 * fields.count) + "\r\n$4\r\nHSET\r\n$" +
              std::to_string(key.size()) + "\r\n" + key;
      for (std::size_t i = 0; i < fields.count; ++i) {
        const std::size_t more = i + 1 == fields.count ? kRecordHeaderNbytes : 0;
        names[i].append("\r\n$1\r\n").append(fields.name(i));
        names[i].append("\r\n$").append(std::to_string(fields.nbytes[i] + more)).append("\r\n");
      }
      break;
    case Kind::kGet: {
      into = buffer;
      std::array<std::string_view, 2 + kMaxRecordFields> command = {"HMGET", key};
      for (std::size_t i = 0; i < fields.count; ++i) command[2 + i] = fields.name(i);
      append_command(head, std::span(command).first(2 + fields.count));
      break;
    }
    case Kind::kContains:
    case Kind::kTouch:
      head += presence_head(kind, 1);
      append_word(end, key);
      break;
    case Kind::kExpire:
      append_command(head, {"PEXPIRE", key, std::to_string(RespUses::shortened(ttl).count())});
      break;
    default:
      append_command(head, {"UNLINK", key});
      break;
  }
}

RespRequest::RespRequest(Kind kind_, std::string key, std::chrono::milliseconds ttl, bool asking_)
    : kind(kind_),
      deadline(Clock::now() + kRespPatience),
      head(asking_ ? kAsking : std::string_view()),
      end_made(true),
      key_text(std::move(key)),
      asking(asking_) {
  if (kind == Kind::kRenew) {
    append_command(head, {"PEXPIRE", key_text, std::to_string(ttl.count())});
  } else {
    append_command(head, {kind == Kind::kAge ? "PTTL" : "UNLINK", key_text});
  }
}

bool RespRequest::can_join(const Item& other) const {
  if (kind != Kind::kTouch && kind != Kind::kContains) return false;
  return item && !asking && hops == 0 && sent == 0 && keys < kMaxJoined && !is_put(item->op()) &&
         item->op() == other.op() && item->is_of_batch(other);
}

void RespRequest::join(Item&& other) {
  append_word(end, other.key().text);
  head = presence_head(kind, ++keys);
  joined.push_back(std::move(other));
}

void RespRequest::make_end(const std::optional<RecordHeader>& last, std::string_view key,
                           std::chrono::milliseconds ttl) {
  const RecordHeader sent_header = last.value_or(RecordHeader{});
  const std::size_t before = before_end();
  end.assign(reinterpret_cast<const char*>(&sent_header), sizeof sent_header);
  end += "\r\n";
  answerable[1] = before + end.size();
  if (last) {
    append_command(end, {"PEXPIRE", key, std::to_string(ttl.count())});
  } else {
    append_command(end,
                   {"PEXPIRE", key});  // an error, so that EXEC refuses all; DISCARD would need another right
  }
  answerable[2] = before + end.size();
  append_command(end, {"EXEC"});
  answerable[3] = before + end.size();
  end_made = true;
}

std::size_t RespRequest::before_end() const {
  std::size_t nbytes = head.size() + body.size();
  for (const std::string& name : names) nbytes += name.size();
  return nbytes;
}

std::size_t RespRequest::cost() const {
  const std::size_t to_come = asks_before_put() ? item->buffer().size() / kSendWindowsAhead : 0;
  return keys * kRequestNbytes + body.size() + into.size() + to_come;
}

std::size_t RespRequest::released_by(std::size_t moved_nbytes) const {
  const std::size_t kept = kRequestNbytes + std::min(body.size(), kUnansweredNbytes);
  return cost_left > kept ? std::min(moved_nbytes, cost_left - kept) : 0;
}

bool RespRequest::give_up_sending() {
  const std::size_t before = before_end();
  if (sent >= before && end_made) return true;  // the rest is in our memory: keep the record
  if (sent < before && before - sent > kMaxFillNbytes) return false;
  key_text = item->key().text;
  end.clear();
  end_made = false;
  return true;
}

}  // namespace kvpool
