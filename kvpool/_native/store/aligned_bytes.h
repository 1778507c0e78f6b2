// Memory that begins where O_DIRECT takes it.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace kvpool {

struct FreeBytes {
  void operator()(std::byte* bytes) const { std::free(bytes); }
};
using AlignedBytes = std::unique_ptr<std::byte[], FreeBytes>;

// Not cleared. Throws std::bad_alloc.
inline AlignedBytes make_aligned_bytes(std::size_t nbytes) {
  constexpr std::size_t kPage = 4096;
  auto* const bytes =
      static_cast<std::byte*>(std::aligned_alloc(kPage, (nbytes + kPage - 1) / kPage * kPage));
  if (bytes == nullptr) throw std::bad_alloc();
  return AlignedBytes(bytes);
}

}  // namespace kvpool
