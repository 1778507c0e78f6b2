// A list of whole numbers in JSON, read without an object for each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace kvpool {

// `text`: the list, with its brackets. `most`: its largest length. `highest`: its largest number.
// `is_signed`: also from -2**63, as two's complement. Throws std::invalid_argument for a malformed or longer
// list, std::overflow_error for a number out of range; the text follows the field's name.
std::vector<std::uint64_t> json_numbers(std::string_view text, std::size_t most, std::uint64_t highest,
                                        bool is_signed);

}  // namespace kvpool
