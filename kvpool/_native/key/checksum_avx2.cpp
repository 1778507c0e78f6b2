// XXH3-64 compiled for AVX2.
#include "key/checksum_kernel.h"

namespace kvpool {
const ChecksumTable kChecksumAvx2 = {"avx2", reset, update, digest};
}
