#include "index/lookup_request.h"

#include <algorithm>
#include <cstdint>

namespace kvpool {
namespace {

constexpr std::size_t kTokenNbytes = 4;

// Tags of one byte: field number and wire type 2, as all fields here.
constexpr std::uint8_t tag_of(unsigned field) { return static_cast<std::uint8_t>(field << 3 | 2); }

class Fields {
 public:
  explicit Fields(std::string_view message) : left_(message) {}

  bool done() const { return left_.empty(); }

  // False: the message ends within the field, or its length takes more than four bytes.
  bool next(std::uint8_t& tag, std::string_view& value) {
    tag = static_cast<std::uint8_t>(left_[0]);
    std::size_t nbytes = 0;
    for (std::size_t i = 0; i < 4; ++i) {
      if (i + 1 >= left_.size()) return false;
      const auto byte = static_cast<std::uint8_t>(left_[i + 1]);
      nbytes |= std::size_t{byte & 0x7fU} << 7 * i;
      if (byte < 0x80) {
        left_.remove_prefix(i + 2);
        if (nbytes > left_.size()) return false;
        value = left_.substr(0, nbytes);
        left_.remove_prefix(nbytes);
        return true;
      }
    }
    return false;
  }

 private:
  std::string_view left_;
};

bool is_ascii(std::string_view text) {
  return std::ranges::all_of(text, [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

// is_plain: only the tokens enter their hash.
bool read_scope(std::string_view message, LookupRequest& request, bool& is_plain) {
  unsigned seen = 0;
  for (Fields fields(message); !fields.done();) {
    std::uint8_t tag;
    std::string_view text;
    if (!fields.next(tag, text) || tag < tag_of(1) || tag > tag_of(5) || (tag & 7) != 2) return false;
    const unsigned bit = 1U << (tag >> 3);
    if ((seen & bit) != 0 || !is_ascii(text)) return false;
    seen |= bit;
    if (tag == tag_of(1)) {
      request.model = text;
    } else if (tag == tag_of(2)) {
      request.tenant = text;
    } else {
      is_plain = is_plain && text.empty();
    }
  }
  return true;
}

}  // namespace

std::optional<LookupRequest> read_lookup_request(std::span<const std::byte> message) {
  LookupRequest request;
  bool has_scope = false, has_prompt = false, is_plain = true;
  for (Fields fields({reinterpret_cast<const char*>(message.data()), message.size()}); !fields.done();) {
    std::uint8_t tag;
    std::string_view value;
    if (!fields.next(tag, value)) return std::nullopt;
    if (tag == tag_of(1)) {
      if (has_scope || !read_scope(value, request, is_plain)) return std::nullopt;
      has_scope = true;
    } else if (tag == tag_of(2) || tag == tag_of(3)) {
      if (has_prompt) return std::nullopt;
      has_prompt = true;
      request.in_tokens = tag == tag_of(3);
      request.prompt = std::as_bytes(std::span(value));
    } else if (tag == tag_of(5)) {
      if (!is_ascii(value)) return std::nullopt;
      request.workers.push_back(value);
    } else {
      return std::nullopt;
    }
  }
  if (!has_prompt) return std::nullopt;
  if (request.in_tokens && (!is_plain || request.prompt.size() % kTokenNbytes != 0)) return std::nullopt;
  return request;
}

}  // namespace kvpool
