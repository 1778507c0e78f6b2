// The functions of one instruction set. No includes: see checksum_kernel.h.
#pragma once

namespace kvpool {

struct ChecksumTable {
  const char* isa;
  void (*reset)(void* state);
  void (*update)(void* state, const void* data, unsigned long nbytes);
  unsigned long long (*digest)(const void* state);
};

extern const ChecksumTable kChecksumBaseline;
extern const ChecksumTable kChecksumAvx2;
extern const ChecksumTable kChecksumAvx512;

}  // namespace kvpool
