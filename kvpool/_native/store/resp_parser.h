// Reads RESP2 replies from pieces of any size; knows nothing of sockets, requests or memory.
//
// The bytes of a bulk string never pass through here: after a kBulk token the reader of the stream delivers
// bulk_left() bytes to wherever they belong, tells take(), and goes on with next(), which checks the end of
// the string.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace kvpool {

inline constexpr std::size_t kMaxRespLineNbytes = 4096;        // an error may name a key or two
inline constexpr std::int64_t kMaxRespBulkNbytes = 512 << 20;  // the servers' own default limit
inline constexpr std::int64_t kMaxRespArrayItems = 1 << 20;

enum class RespKind : std::uint8_t {
  kSimple,   // text
  kError,    // text, without the '-'
  kInteger,  // value
  kBulk,     // value: how many bytes follow
  kBulkEnd,  // the bulk string was ended as it should be
  kNil,      // a bulk string or an array that is not there
  kArray,    // value: how many replies follow
  kBad,      // no RESP2, or beyond a limit: nothing that follows can be understood
};

struct RespToken {
  RespKind kind;
  std::int64_t value = 0;
  std::string_view text = {};  // until the next call
};

class RespParser {
 public:
  // Takes one token off the front of `input`. Nothing: all of `input` is taken and more is needed.
  // Must not be called while bulk_left() is above 0. After kBad: kBad again.
  std::optional<RespToken> next(std::span<const std::byte>& input);

  // Bytes of the current bulk string that are still to come.
  std::uint64_t bulk_left() const { return bulk_left_; }
  // `nbytes` of them have come.
  void take(std::uint64_t nbytes);

  // As new: for another connection.
  void reset();

 private:
  RespToken read_line(std::string_view line);
  RespToken bad();

  std::string line_;  // the part of a line that came in earlier pieces
  std::string text_;  // what the last token's text points to, when the line came in pieces
  std::uint64_t bulk_left_ = 0;
  bool in_bulk_ = false;      // a kBulk was returned, its kBulkEnd was not
  std::size_t end_seen_ = 0;  // bytes of the CR LF behind a bulk string
  bool bad_ = false;
};

}  // namespace kvpool
