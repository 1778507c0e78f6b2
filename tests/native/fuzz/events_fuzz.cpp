// Engines' events: decoded or refused, and what was decoded lies inside of its own lists.
#include <cstdint>

#include "check.h"
#include "index/events.h"

using namespace kvpool;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  try {
    const EventBatch batch = decode_events(std::as_bytes(std::span(data, nbytes)));
    for (const Event& event : batch.events) {
      CHECK(event.begin <= batch.hashes.size() && event.count <= batch.hashes.size() - event.begin);
      CHECK(event.group <= kMaxGroup);
    }
    CHECK(batch.hashes.size() <= nbytes && batch.events.size() <= nbytes);
    CHECK(!batch.dp_rank || *batch.dp_rank <= kMaxDpRank);
  } catch (const MalformedEvents&) {
  }
  return 0;
}
