#include "index/json_size.h"

#include <algorithm>
#include <cstdint>

namespace kvpool {

JsonSize json_size(std::span<const std::byte> text) {
  JsonSize size{};
  while (!text.empty()) {
    // As many as a counter of one byte can count: the compiler then takes a register of bytes at a time.
    const auto part = text.first(std::min<std::size_t>(text.size(), 240));
    std::uint8_t commas = 0, containers = 0;
    for (const std::byte one : part) {
      commas = static_cast<std::uint8_t>(commas + (one == std::byte{','}));
      containers =
          static_cast<std::uint8_t>(containers + ((one | std::byte{0x20}) == std::byte{'{'}));  // or '['
    }
    size.commas += commas;
    size.containers += containers;
    text = text.subspan(part.size());
  }
  return size;
}

}  // namespace kvpool
