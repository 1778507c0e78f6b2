#include "key/checksum_kernel.h"

namespace kvpool {
const ChecksumTable kChecksumAvx512 = {"avx512", reset, update, digest};
}
