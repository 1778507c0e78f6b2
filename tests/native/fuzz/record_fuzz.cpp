// Keys and records: a text that is taken for a key is spelled as it says, and only the header that we would write
// for these bytes proves them.
//   input: a line that may be a key, then a header and its payload
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "check.h"
#include "key/record.h"

using namespace kvpool;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  const std::string_view input(reinterpret_cast<const char*>(data), nbytes);
  const std::size_t end = std::min(input.find('\n'), input.size());
  Key key = parse_key("kvpool:t:" + std::string(32, 'a') + ":" + std::string(16, '0') + ":0:0");
  try {
    key = parse_key(input.substr(0, end));
    CHECK(key.text == input.substr(0, end));
    CHECK(key.text.substr(key.hash_end) == ":" + std::to_string(key.group) + ":" + std::to_string(key.rank));
  } catch (const std::invalid_argument&) {
  }
  const auto rest = std::as_bytes(std::span(input.substr(std::min(end + 1, input.size()))));
  const auto header = rest.first(std::min(rest.size(), kRecordHeaderNbytes));
  const auto payload = rest.subspan(header.size());
  const Damage damage = verify_record(key, header, payload);
  const RecordHeader ours = pack_header(key, payload);
  RecordHeader theirs{};
  std::memcpy(&theirs, header.data(), header.size());
  const bool same = header.size() == sizeof ours && std::memcmp(&theirs, &ours, sizeof ours) == 0;
  const bool is_named = theirs.writer != ours.writer;  // which its checksum covers
  CHECK(damage == Damage::kNone ? same || is_named : !same);
  CHECK(verify_record(key, std::as_bytes(std::span(&ours, 1)), payload) == Damage::kNone);
  return 0;
}
