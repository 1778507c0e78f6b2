// Paths of records, and valid names of records.
#include "store/record_file.h"

#include <algorithm>
#include <charconv>
#include <stdexcept>

#include "store/usage.h"

namespace kvpool {
namespace {

constexpr std::size_t kBucketDigits = 3;
static_assert(kBuckets == 1U << (4 * kBucketDigits));
constexpr std::string_view kPrefix = "kvpool:";  // of every key; its parts contain no '.' or '/'

}  // namespace

unsigned bucket_of(const Key& key) {
  const std::string_view hash = key.hash();
  unsigned bucket = 0;
  std::from_chars(hash.data() + hash.size() - kBucketDigits, hash.data() + hash.size(), bucket, 16);
  return bucket;
}

std::string bucket_path(const std::string& root, unsigned bucket) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string path = root + "/blocks/";
  for (unsigned shift = 4 * kBucketDigits; shift != 0; shift -= 4)
    path += kDigits[bucket >> (shift - 4) & 0xf];
  return path;
}

std::string record_path(const std::string& root, const Key& key) {
  std::string name = key.text.substr(kPrefix.size());
  std::replace(name.begin(), name.end(), ':', '.');
  return bucket_path(root, bucket_of(key)) + "/" + name;
}

bool is_record_name(unsigned bucket, std::string_view name) {
  std::string text(kPrefix);
  for (const char c : name) {
    if (c == ':') return false;
    text += c == '.' ? ':' : c;
  }
  try {
    return bucket_of(parse_key(text)) == bucket;
  } catch (const std::invalid_argument&) {
    return false;
  }
}

}  // namespace kvpool
