// XXH3-64 compiled for AVX-512.
#include "key/checksum_kernel.h"

namespace kvpool {
const ChecksumTable kChecksumAvx512 = {"avx512", reset, update, digest};
}
