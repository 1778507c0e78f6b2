// A list of token ids in JSON (RFC 8259), read without an object for each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace kvpool {

// `text`: the list, with its brackets. `most`: its largest length. Throws std::invalid_argument; the text
// follows the field's name.
std::vector<std::uint32_t> read_token_list(std::string_view text, std::size_t most);

}  // namespace kvpool
