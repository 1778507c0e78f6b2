// Parses RESP2 replies from pieces of any size; independent of sockets, requests and memory.
//
// Bulk strings bypass the parser: after a kBulk token the caller delivers bulk_left() bytes itself and calls
// take(). next() then checks the end of the string.
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
  kBulk,     // value: number of following bytes
  kBulkEnd,  // the bulk string ended correctly
  kNil,      // an absent bulk string or array
  kArray,    // value: number of following replies
  kBad,      // no RESP2, or beyond a limit: the stream is useless
};

struct RespToken {
  RespKind kind;
  std::int64_t value = 0;
  std::string_view text = {};  // until the next call
};

class RespParser {
 public:
  // Takes one token off the front of `input`. Nothing: all of `input` is taken and more is needed. Must not
  // be called while bulk_left() is above 0. After kBad: kBad again.
  std::optional<RespToken> next(std::span<const std::byte>& input);

  // Bytes still missing of the current bulk string.
  std::uint64_t bulk_left() const { return bulk_left_; }
  // `nbytes` of them arrived.
  void take(std::uint64_t nbytes);

  // For another connection.
  void reset();

 private:
  RespToken read_line(std::string_view line);
  RespToken bad();

  std::string line_;  // part of a line from earlier pieces
  std::string text_;  // storage of the last token's text, if split
  std::uint64_t bulk_left_ = 0;
  bool in_bulk_ = false;      // after kBulk, before kBulkEnd
  std::size_t end_seen_ = 0;  // bytes of the CR LF after a bulk string
  bool bad_ = false;
};

}  // namespace kvpool
