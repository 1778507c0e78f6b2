// How many objects a JSON text may become, before it is read.
#pragma once

#include <cstddef>
#include <span>

namespace kvpool {

struct JsonSize {
  std::size_t commas, containers;  // in strings, too
};

JsonSize json_size(std::span<const std::byte> text);

}  // namespace kvpool
