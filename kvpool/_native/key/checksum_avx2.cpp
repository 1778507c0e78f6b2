#include "key/checksum_kernel.h"

namespace kvpool {
const ChecksumTable kChecksumAvx2 = {"avx2", reset, update, digest};
}
