// XXH3-64, streamed, with the fastest instruction set of this CPU.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvpool {

class Checksum {
 public:
  Checksum();
  void update(std::span<const std::byte> data);
  std::uint64_t digest() const;

 private:
  // XXH3_state_t; its size and alignment are asserted beside xxhash.h.
  alignas(64) std::array<std::byte, 576> state_;
};

// "avx512", "avx2", "sse2", or "portable" (NEON on ARM).
const char* checksum_isa();

}  // namespace kvpool
