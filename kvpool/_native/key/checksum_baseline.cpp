// XXH3-64 for any CPU of this architecture.
#include "key/checksum_kernel.h"

#if defined(__x86_64__)
#define KVPOOL_BASELINE_ISA "sse2"
#else
#define KVPOOL_BASELINE_ISA "portable"
#endif

namespace kvpool {
const ChecksumTable kChecksumBaseline = {KVPOOL_BASELINE_ISA, reset, update, digest};
}
