// What a connection asks a server for one item, and how far it has come with that.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "engine.h"
#include "record.h"

namespace kvpool {

inline constexpr std::size_t kRespTailNbytes = 128;
inline constexpr std::string_view kAsking = "*1\r\n$6\r\nASKING\r\n";

struct RespRequest {
  enum class Kind : std::uint8_t { kPut, kGet, kContains, kDelete, kTouch, kCleanup };
  enum class Stage : std::uint8_t { kStart, kHeader, kBody };
  enum class Sink : std::uint8_t { kNowhere, kHeader, kBody };

  Kind kind;
  std::optional<Item> item;  // none once nobody waits for it, or for a cleanup
  Clock::time_point deadline;

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
  bool expires = false;  // put: HSET is answered, PEXPIRE is not
  Status outcome = Status::kOk;
  std::string words;

  // Where the server sends us instead: set by one of the replies, acted on after the last.
  std::string moved_host;
  unsigned moved_port = 0;  // 0: nowhere
  bool moved_asking = false;
  unsigned hops = 0;
  bool asking = false;  // each command comes after an ASKING, which has a reply of its own
  bool asked = false;   // that reply has come

  void compose();
  std::size_t total_nbytes() const { return head.size() + body.size() + end.size(); }
  bool is_sent() const { return end_made && sent == total_nbytes(); }
  bool on_the_wire() const { return sent != 0; }
};

}  // namespace kvpool
