// One item's request to a server, and its progress.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "key/record.h"
#include "store/io_executor.h"

namespace kvpool {

inline constexpr std::size_t kRequestNbytes = 128;  // of a key's request, beside its payload
inline constexpr std::size_t kMaxJoined = 64;       // keys of one command
// A sent value's cost until the server answers. One value and a part of the next keep a server busy; more in
// the sockets leaves the caches and is copied once more.
inline constexpr std::size_t kUnansweredNbytes = 256 * 1024;
// The connection is lost when a given up item's reply is due and nothing moves for this long.
inline constexpr auto kRespPatience = std::chrono::seconds(5);
inline constexpr std::string_view kAsking = "*1\r\n$6\r\nASKING\r\n";

struct RespRequest {
  // kCleanup deletes a damaged record; without an item, kAge reads a time to live, kRenew restarts it. kExpire
  // shortens it.
  enum class Kind : std::uint8_t { kPut, kGet, kContains, kDelete, kTouch, kExpire, kCleanup, kAge, kRenew };
  // The replies to a put: to each of its commands, then EXEC's two results.
  enum class PutReply : std::uint8_t { kMulti, kHset, kPexpire, kExec, kHsetDone, kPexpireDone };

  // Composes the item's command. `ttl`: of used values.
  RespRequest(Kind kind, Item&& item, std::chrono::milliseconds ttl, bool asking = false, unsigned hops = 0);
  // Without an item: kCleanup, kAge or kRenew.
  RespRequest(Kind kind, std::string key, std::chrono::milliseconds ttl, bool asking = false);

  Kind kind;
  std::optional<Item> item;  // none once given up
  std::vector<Item> joined;  // further ones of its batch, whose presence the same command asks for
  std::size_t keys = 1;      // of the command
  Clock::time_point deadline;
  // Once given up: the longest silence before the connection is lost, and its end however much moves.
  Clock::duration patience = kRespPatience;
  Clock::time_point lost_at = Clock::time_point::max();

  // The sent bytes: head; of a put each field's name and payload, which lies in the caller's buffer; end, which holds
  // the keys of a question of presence.
  std::string head;
  std::span<const std::byte> body;  // put
  std::string end;
  bool end_made = false;
  std::size_t sent = 0;
  std::size_t hashed = 0;  // of the body, for a put
  std::size_t cost_left = 0;

  // Put and get: how the record is cut. A put's names[i] is sent before field i.
  RecordFields fields;
  std::array<std::string, kMaxRecordFields> names;

  // The received bytes.
  std::span<std::byte> into;   // get: target of the payload
  bool has_begun = false;      // the reply's array
  bool is_kept = false;        // the present field belongs to the record
  std::size_t field = 0;       // the present one, or the next
  std::size_t missing = 0;     // fields
  std::size_t got = 0;         // of the payload
  std::size_t field_left = 0;  // of the payload, in the present field
  std::array<std::byte, kRecordHeaderNbytes> header;
  std::size_t header_got = 0;
  std::unique_ptr<RecordChecksum> checksum;
  Damage damage = Damage::kNone;
  PutReply put_reply = PutReply::kMulti;  // put: the next to come
  // put: bytes to send before each of its first four replies can come
  std::array<std::size_t, 4> answerable = {SIZE_MAX, SIZE_MAX, SIZE_MAX, SIZE_MAX};
  Status outcome = Status::kOk;
  std::string words;
  std::string key_text;  // without an item: kCleanup, kAge, kRenew, and a given up put

  // The redirect's target: set by one of the replies, followed after the last.
  std::string moved_host;
  unsigned moved_port = 0;  // 0: none
  bool moved_asking = false;
  unsigned hops = 0;
  bool asking = false;  // it begins with an ASKING, which has its own reply
  bool asked = false;   // that reply has come

  // The rest of a put: the header, the time to live, and the end of the transaction. No `last` header: the put is
  // given up midway and leaves nothing.
  void make_end(const std::optional<RecordHeader>& last, std::string_view key_text,
                std::chrono::milliseconds ttl);
  // Releases the caller's buffer while a put is being sent. False: too much of it is left; else zeros replace
  // the rest, and the transaction fails.
  bool give_up_sending();
  // Whether it tests the presence of a kPutAbsent's key, which is put if missing.
  bool asks_before_put() const { return item && item->op() == Op::kPutAbsent && kind != Kind::kPut; }
  // Whether its command may ask for the presence of this item's key, too: both are of one batch, and nothing was sent.
  bool can_join(const Item& other) const;
  void join(Item&& other);
  // Its share of the connection's send window.
  std::size_t cost() const;
  // The part of that released by further sent or received payload bytes.
  std::size_t released_by(std::size_t moved_nbytes) const;
  std::size_t before_end() const;
  std::size_t total_nbytes() const { return before_end() + end.size(); }
  bool is_sent() const { return end_made && sent == total_nbytes(); }
  bool on_the_wire() const { return sent != 0; }
};

}  // namespace kvpool
