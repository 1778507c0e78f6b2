// Packed LookupRequests: read or left to protobuf, and what was read lies inside of the message.
#include <cstdint>

#include "check.h"
#include "index/lookup_request.h"

using namespace kvpool;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  const auto message = std::as_bytes(std::span(data, nbytes));
  const auto request = read_lookup_request(message);
  if (!request) return 0;
  const auto lies_inside = [&](const auto& part) {
    if (part.empty()) return true;
    const auto* begin = reinterpret_cast<const std::byte*>(part.data());
    return begin >= message.data() && begin + part.size() <= message.data() + nbytes;
  };
  CHECK(lies_inside(request->model) && lies_inside(request->tenant) && lies_inside(request->prompt));
  CHECK(!request->in_tokens || request->prompt.size() % 4 == 0);
  std::size_t read = request->model.size() + request->tenant.size() + request->prompt.size() + 2;
  for (const std::string_view name : request->workers) {
    CHECK(lies_inside(name));
    read += name.size() + 2;  // a tag and a length
  }
  CHECK(read <= nbytes);
  return 0;
}
