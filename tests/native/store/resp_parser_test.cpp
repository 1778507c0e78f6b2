// The reply parser: the same tokens however the bytes are cut, and nothing but kBad for what is no RESP2.
#include "store/resp_parser.h"

#include <random>
#include <string>
#include <vector>

#include "check.h"

namespace kvpool {
namespace {

std::span<const std::byte> bytes(std::string_view text) { return std::as_bytes(std::span(text)); }

// The tokens of `pieces`, written down; a bulk string's own bytes stand behind its token.
std::string read(const std::vector<std::string>& pieces) {
  RespParser parser;
  std::string seen;
  for (const std::string& piece : pieces) {
    std::span<const std::byte> input = bytes(piece);
    while (!input.empty()) {
      if (parser.bulk_left() != 0) {
        const auto n = static_cast<std::size_t>(std::min<std::uint64_t>(parser.bulk_left(), input.size()));
        seen.append(reinterpret_cast<const char*>(input.data()), n);
        parser.take(n);
        input = input.subspan(n);
        continue;
      }
      const auto token = parser.next(input);
      if (!token) {
        CHECK(input.empty());
        break;
      }
      switch (token->kind) {
        case RespKind::kSimple:
          seen.append("+").append(token->text).append("|");
          break;
        case RespKind::kError:
          seen.append("-").append(token->text).append("|");
          break;
        case RespKind::kInteger:
          seen.append(":").append(std::to_string(token->value)).append("|");
          break;
        case RespKind::kBulk:
          seen.append("$").append(std::to_string(token->value)).append(" ");
          break;
        case RespKind::kBulkEnd:
          seen.append("|");
          break;
        case RespKind::kNil:
          seen.append("nil|");
          break;
        case RespKind::kArray:
          seen.append("*").append(std::to_string(token->value)).append("|");
          break;
        case RespKind::kBad:
          return seen + "bad";
      }
    }
  }
  return seen;
}

const std::string kReplies =
    "+OK\r\n:-12\r\n-OOM command not "
    "allowed\r\n*2\r\n$5\r\nab\r\nc\r\n$0\r\n\r\n*2\r\n$-1\r\n$-1\r\n*-1\r\n*0\r\n"
    ":9223372036854775807\r\n+\r\n";
const std::string kTokens =
    "+OK|:-12|-OOM command not allowed|*2|$5 ab\r\nc|$0 |*2|nil|nil|nil|*0|:9223372036854775807|+|";

}  // namespace

TEST(resp_parser_reads_every_kind_of_reply) { CHECK(read({kReplies}) == kTokens); }

TEST(resp_parser_does_not_care_where_the_bytes_are_cut) {
  for (std::size_t cut = 0; cut <= kReplies.size(); ++cut) {
    CHECK(read({kReplies.substr(0, cut), kReplies.substr(cut)}) == kTokens);
  }
  std::vector<std::string> single;
  for (const char c : kReplies) single.emplace_back(1, c);
  CHECK(read(single) == kTokens);
  std::mt19937 random(7);
  for (int round = 0; round < 500; ++round) {
    std::vector<std::string> pieces;
    for (std::size_t at = 0; at < kReplies.size();) {
      const std::size_t n = 1 + random() % 9;
      pieces.push_back(kReplies.substr(at, n));
      at += n;
    }
    CHECK(read(pieces) == kTokens);
  }
}

TEST(resp_parser_calls_the_rest_bad) {
  for (const std::string text : {"\r\n",
                                 "x\r\n",
                                 "OK\r\n",
                                 "HTTP/1.1 400 Bad Request\r\n",
                                 "%1\r\n",
                                 ">2\r\n",
                                 "_\r\n",
                                 "#t\r\n",
                                 ",1.5\r\n",
                                 "+O\rK\r\n",
                                 "+OK\n",
                                 "\n",
                                 ":\r\n",
                                 ":1a\r\n",
                                 ": 1\r\n",
                                 ":+1\r\n",
                                 ":1 \r\n",
                                 ":99999999999999999999\r\n",
                                 "$\r\n",
                                 "$-2\r\n",
                                 "$x\r\n",
                                 "$536870913\r\n",
                                 "$9223372036854775808\r\n",
                                 "*-2\r\n",
                                 "*1048577\r\n",
                                 "*9999999999999999999\r\n",
                                 "$-1\n",
                                 "$3\r\nabcd\r\n",
                                 "$3\r\nabc\n\r",
                                 "$3\r\nabc\r\r",
                                 "$0\r\n+OK\r\n"}) {
    const std::string whole = read({text});
    CHECK(whole.ends_with("bad"));
    std::vector<std::string> single;
    for (const char c : text) single.emplace_back(1, c);
    CHECK(read(single) == whole);
  }
  CHECK(read({"$536870912\r\n"}) == "$536870912 ");
}

TEST(resp_parser_stays_bad_until_it_is_reset) {
  RespParser parser;
  auto input = bytes("?");
  CHECK(parser.next(input)->kind == RespKind::kBad);
  input = bytes("+OK\r\n");
  CHECK(parser.next(input)->kind == RespKind::kBad);
  parser.reset();
  input = bytes("+OK\r\n");
  CHECK(parser.next(input)->kind == RespKind::kSimple);
}

TEST(resp_parser_holds_no_line_without_end) {
  RespParser parser;
  const std::string piece(100, 'x');
  auto input = bytes("-");
  CHECK(!parser.next(input));
  int pieces = 0;
  for (;; ++pieces) {
    input = bytes(piece);
    const auto token = parser.next(input);
    if (token) {
      CHECK(token->kind == RespKind::kBad);
      break;
    }
  }
  CHECK(pieces == static_cast<int>(kMaxRespLineNbytes / 100));
}

TEST(resp_parser_survives_noise) {
  std::mt19937 random(11);
  const std::string letters = "+-:$*\r\n0123456789abc";
  for (int round = 0; round < 20'000; ++round) {
    std::string noise;
    for (std::size_t n = random() % 40; n != 0; --n) noise.push_back(letters[random() % letters.size()]);
    read({noise});
  }
}

}  // namespace kvpool
