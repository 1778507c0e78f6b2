// The parser, one line or piece of a value at a time.
#include "store/resp_parser.h"

#include <algorithm>
#include <cassert>
#include <charconv>
#include <cstring>

namespace kvpool {
namespace {

std::string_view as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Digits with an optional minus, and nothing else.
bool read_number(std::string_view text, std::int64_t& value) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return !text.empty() && error == std::errc() && stop == end;
}

}  // namespace

std::optional<RespToken> RespParser::next(std::span<const std::byte>& input) {
  assert(bulk_left_ == 0);
  if (bad_) return bad();
  if (in_bulk_) {
    constexpr std::string_view kEnd = "\r\n";
    while (!input.empty()) {
      if (as_text(input)[0] != kEnd[end_seen_]) return bad();
      input = input.subspan(1);
      if (++end_seen_ == kEnd.size()) {
        in_bulk_ = false;
        end_seen_ = 0;
        return RespToken{RespKind::kBulkEnd};
      }
    }
    return std::nullopt;
  }
  if (input.empty()) return std::nullopt;
  const std::string_view text = as_text(input);
  const std::size_t newline = text.find('\n');
  const std::size_t taken = newline == std::string_view::npos ? text.size() : newline + 1;
  if (line_.size() + taken > kMaxRespLineNbytes) return bad();
  input = input.subspan(taken);
  if (newline == std::string_view::npos) {
    // Fails at the first byte, because the end of the line may never come.
    if (line_.empty() && std::strchr("+-:$*", text[0]) == nullptr) return bad();
    line_.append(text);
    return std::nullopt;
  }
  if (line_.empty()) return read_line(text.substr(0, taken));
  line_.append(text.substr(0, taken));
  text_.swap(line_);
  line_.clear();
  return read_line(text_);
}

RespToken RespParser::read_line(std::string_view line) {
  if (line.size() < 3 || line[line.size() - 2] != '\r') return bad();
  const std::string_view text = line.substr(1, line.size() - 3);
  if (text.find('\r') != std::string_view::npos) return bad();
  std::int64_t value = 0;
  switch (line[0]) {
    case '+':
      return {RespKind::kSimple, 0, text};
    case '-':
      return {RespKind::kError, 0, text};
    case ':':
      return read_number(text, value) ? RespToken{RespKind::kInteger, value} : bad();
    case '$':
      if (!read_number(text, value) || value < -1 || value > kMaxRespBulkNbytes) return bad();
      if (value == -1) return {RespKind::kNil};
      in_bulk_ = true;
      bulk_left_ = static_cast<std::uint64_t>(value);
      return {RespKind::kBulk, value};
    case '*':
      if (!read_number(text, value) || value < -1 || value > kMaxRespArrayItems) return bad();
      if (value == -1) return {RespKind::kNil};
      return {RespKind::kArray, value};
    default:
      return bad();
  }
}

void RespParser::take(std::uint64_t nbytes) {
  assert(nbytes <= bulk_left_);
  bulk_left_ -= nbytes;
}

void RespParser::reset() { *this = RespParser(); }

RespToken RespParser::bad() {
  bad_ = true;
  return {RespKind::kBad};
}

}  // namespace kvpool
