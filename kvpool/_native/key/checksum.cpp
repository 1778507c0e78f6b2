// Picks the compiled kernel for this CPU at start.
#include "key/checksum.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "key/checksum_table.h"

namespace kvpool {
namespace {

#if defined(__x86_64__)
// Asks the CPU itself: zig 0.17's __builtin_cpu_supports() knows no feature.
const ChecksumTable& pick_table() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & bit_OSXSAVE) == 0) return kChecksumBaseline;
  // Registers that the operating system saves per thread: bits 1 and 2 for AVX, 5 to 7 for AVX-512 too.
  unsigned kept = 0, high = 0;
  asm volatile("xgetbv" : "=a"(kept), "=d"(high) : "c"(0));
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return kChecksumBaseline;
  if ((ebx & bit_AVX512F) != 0 && (kept & 0xE6) == 0xE6) return kChecksumAvx512;
  if ((ebx & bit_AVX2) != 0 && (kept & 0x06) == 0x06) return kChecksumAvx2;
  return kChecksumBaseline;
}
#else
const ChecksumTable& pick_table() { return kChecksumBaseline; }
#endif

const ChecksumTable& table() {
  static const ChecksumTable& picked = pick_table();
  return picked;
}

}  // namespace

Checksum::Checksum() { table().reset(state_.data()); }

void Checksum::update(std::span<const std::byte> data) {
  table().update(state_.data(), data.data(), data.size());
}

std::uint64_t Checksum::digest() const { return table().digest(state_.data()); }

const char* checksum_isa() { return table().isa; }

}  // namespace kvpool
