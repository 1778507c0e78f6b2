// Which of the compiled kernels this CPU takes, chosen when the program starts.
#include "key/checksum.h"

#include "key/checksum_table.h"

namespace kvpool {
namespace {

const ChecksumTable& pick_table() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return kChecksumAvx512;
  if (__builtin_cpu_supports("avx2")) return kChecksumAvx2;
#endif
  return kChecksumBaseline;
}

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
