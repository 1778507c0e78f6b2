// The usual form of a packed LookupRequest (protos/kvpool/v1/index.proto), read without protobuf.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace kvpool {

// Views into the message.
struct LookupRequest {
  std::string_view model;
  std::string_view tenant;
  std::vector<std::string_view> workers;
  std::span<const std::byte> prompt;
  bool in_tokens = false;  // packed u32 token ids; else packed u64 block hashes
};

// Nothing: malformed or unusual, for protobuf to judge: text or a chat, an adapter, a salt or images beside
// tokens, a repeated or unknown field, non-ASCII text.
std::optional<LookupRequest> read_lookup_request(std::span<const std::byte> message);

}  // namespace kvpool
