// What a connection asks a server for one item, and how far it has come with that.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "key/record.h"
#include "store/io_executor.h"

namespace kvpool {

inline constexpr std::size_t kRespTailNbytes = 128;
inline constexpr std::size_t kRequestNbytes = 128;  // what a request counts on top of its payload
// A value that was sent counts with at most so many bytes until the server has answered. One value and a part of the
// next keep a server busy; more in the sockets leaves the caches and is copied once more.
inline constexpr std::size_t kUnansweredNbytes = 256 * 1024;
// An item was given up and its reply is due: the connection is lost when nothing has moved for so long.
inline constexpr auto kRespPatience = std::chrono::seconds(5);
inline constexpr std::string_view kAsking = "*1\r\n$6\r\nASKING\r\n";

struct RespRequest {
  // Without an item: kCleanup deletes a damaged record, kAge asks how long a key in use has left, kRenew lets
  // that begin anew.
  enum class Kind : std::uint8_t { kPut, kGet, kContains, kDelete, kTouch, kCleanup, kAge, kRenew };
  // The replies to a put: to each of its commands, then what EXEC made of two of them.
  enum class PutReply : std::uint8_t { kMulti, kHset, kPexpire, kExec, kHsetDone, kPexpireDone };
  enum class Stage : std::uint8_t { kStart, kHeader, kBody };
  enum class Sink : std::uint8_t { kNowhere, kHeader, kBody };

  Kind kind;
  std::optional<Item> item;  // none once it was given up, and for a cleanup
  Clock::time_point deadline;
  // Once it was given up: how long nothing may move until the connection is lost, and when it is
  // given up however much moves.
  Clock::duration patience = kRespPatience;
  Clock::time_point lost_at = Clock::time_point::max();

  // What is sent: head, body, end. `body` lies in the caller's buffer, as do the `tail` bytes behind it.
  std::string head;
  std::span<const std::byte> body;
  std::string end;
  bool end_made = false;
  std::size_t sent = 0;
  std::size_t hashed = 0;  // of the body, for a put
  std::size_t cost_left = 0;

  // What is received.
  std::span<std::byte> into;       // get: where b goes
  std::span<std::byte> into_tail;  // get: where the rest of h goes
  Stage stage = Stage::kStart;
  Sink sink = Sink::kNowhere;
  std::array<std::byte, kRecordHeaderNbytes + kRespTailNbytes> h;
  std::size_t h_got = 0;
  std::uint64_t h_nbytes = 0;
  bool h_is_nil = false;
  std::size_t body_got = 0;
  std::optional<RecordChecksum> checksum;
  Damage damage = Damage::kNone;
  PutReply put_reply = PutReply::kMulti;  // put: the next to come
  // put: what must be sent before each of its first four replies can come
  std::array<std::size_t, 4> answerable = {SIZE_MAX, SIZE_MAX, SIZE_MAX, SIZE_MAX};
  Status outcome = Status::kOk;
  std::string words;
  std::string key_text;  // kAge, kRenew, and a put that was given up

  // Where the server sends us instead: set by one of the replies, acted on after the last.
  std::string moved_host;
  unsigned moved_port = 0;  // 0: nowhere
  bool moved_asking = false;
  unsigned hops = 0;
  bool asking = false;  // it begins with an ASKING, which has a reply of its own
  bool asked = false;   // that reply has come

  void compose();
  // A request without an item, of kind kAge or kRenew.
  static std::unique_ptr<RespRequest> about(Kind kind, std::string key, std::chrono::milliseconds ttl);
  // The rest of a put: the last field, the time to live, and the end of the transaction. `last`: what that field holds;
  // none: the put is given up in the middle, and nothing of it is to stay.
  void make_end(const std::optional<std::string>& h, std::string_view key_text,
                std::chrono::milliseconds ttl);
  // The caller's buffer is let go of while a put is being sent. False: too much of it is left; else zeros take the
  // place of the rest, and the transaction comes to nothing.
  bool give_up_sending();
  // Whether it asks for the key of a kPutAbsent, which is put if the key is missing.
  bool asks_before_put() const { return item && item->op() == Op::kPutAbsent && kind != Kind::kPut; }
  // What it takes of its connection's send window.
  std::size_t cost() const;
  // What of that is given back now that so many more bytes of its payload were sent, or have come.
  std::size_t released_by(std::size_t moved_nbytes) const;
  std::size_t total_nbytes() const { return head.size() + body.size() + end.size(); }
  bool is_sent() const { return end_made && sent == total_nbytes(); }
  bool on_the_wire() const { return sent != 0; }
};

}  // namespace kvpool
