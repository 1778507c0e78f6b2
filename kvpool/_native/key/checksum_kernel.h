// The kernel functions of one instruction set. A .cpp per set includes it, compiled with its own -m flag.
// Only xxhash.h may be included here: the linker could keep a standard inline function's AVX-512 copy for
// all.
#define XXH_INLINE_ALL
#define XXH_STATIC_LINKING_ONLY
#define XXH_PREFETCH_DIST 2048  // bytes; xxhash.h's 512 reads a payload that is in no cache an eighth slower
#include <xxhash.h>

#include "key/checksum_table.h"

namespace {

static_assert(sizeof(XXH3_state_t) == 576 && alignof(XXH3_state_t) == 64, "kvpool::Checksum::state_");

void reset(void* state) { XXH3_64bits_reset(static_cast<XXH3_state_t*>(state)); }

void update(void* state, const void* data, unsigned long nbytes) {
  XXH3_64bits_update(static_cast<XXH3_state_t*>(state), data, nbytes);
}

unsigned long long digest(const void* state) {
  return XXH3_64bits_digest(static_cast<const XXH3_state_t*>(state));
}

}  // namespace
