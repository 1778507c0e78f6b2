// A list of whole numbers in JSON, read without an object for each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace kvpool {

// `text`: the list, with its brackets. `most`: how many it may have. `highest`: the largest number. `is_signed`: numbers
// from -2**63 are taken, too, as two's complement.
// Throws std::invalid_argument for what is no such list, or a longer one, and std::overflow_error for a number out of
// range; the text goes on behind the name of the field.
std::vector<std::uint64_t> json_numbers(std::string_view text, std::size_t most, std::uint64_t highest,
                                        bool is_signed);

}  // namespace kvpool
