// A record: the payload and a header behind it, which proves that these bytes belong to the key.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "key/checksum.h"

namespace kvpool {

inline constexpr std::size_t kRecordHeaderNbytes = 80;
inline constexpr std::array<char, 4> kRecordMagic = {'K', 'V', 'P', 'R'};
inline constexpr std::uint16_t kRecordVersion = 2;
inline constexpr std::size_t kMaxRecordFields = 3;
// Files and received records are hashed in steps of this size, while they are in the cache.
inline constexpr std::size_t kChunkNbytes = 256 * 1024;

// kvpool:{tenant}:{namespace}:{hash}:{group}:{rank}, without the braces.
struct Key {
  std::string text;
  std::uint32_t hash_end = 0;  // offset into text of the ':' after the hash
  std::uint16_t group = 0;
  std::uint16_t rank = 0;
  std::array<std::uint8_t, 16> fingerprint{};  // of the namespace
  std::array<std::uint8_t, 20> hash_prefix{};  // zero padded for a shorter hash
};

// Throws std::invalid_argument with a one-line message.
Key parse_key(std::string_view text);

// Little-endian, as in memory.
struct RecordHeader {
  std::array<char, 4> magic;                 //  0: "KVPR"
  std::uint16_t version;                     //  4: 2; fixes the checksum's algorithm and the fields, too
  std::uint16_t flags;                       //  6: 0; reserved
  std::uint64_t payload_nbytes;              //  8
  std::array<std::uint8_t, 16> fingerprint;  // 16: of the namespace
  std::array<std::uint8_t, 20> hash_prefix;  // 32: first 20 bytes of the block hash, zero padded
  std::uint16_t group;                       // 52
  std::uint16_t rank;                        // 54
  std::array<std::uint8_t, 16> writer;       // 56: who computed the payload; zeros: not named
  std::uint64_t checksum;                    // 72: XXH3-64 over the payload, then this header with 0 here
};
static_assert(sizeof(RecordHeader) == kRecordHeaderNbytes);

// Damage of a record, in the order of the checks; lengths that do not fit are found before the header is read.
enum class Damage : std::uint8_t {
  kNone,
  kTruncated,    // shorter than a header
  kMagic,        // not a record
  kVersion,      // another version
  kFlags,        // reserved bits set
  kLength,       // another payload length than requested
  kFingerprint,  // of another namespace
  kHash,         // of another block
  kGroup,
  kRank,
  kChecksum,  // the bytes changed
};
inline constexpr std::size_t kDamageCount = 11;
std::string_view damage_name(Damage damage);

using Writer = std::array<std::uint8_t, 16>;  // who computed a payload; zeros: not named

// What a record has beside its payload. Of a copy the checksum is known, too.
struct Seal {
  Writer writer{};
  std::optional<std::uint64_t> checksum;
};

// The header for this key and length, with a checksum of zero.
RecordHeader make_header(const Key& key, std::uint64_t payload_nbytes, const Writer& writer = {});

// Streams the checksum of a record: the payload by chunks, then the header.
class RecordChecksum {
 public:
  void update(std::span<const std::byte> chunk) { checksum_.update(chunk); }
  // Once. Ignores header.checksum.
  std::uint64_t digest(const RecordHeader& header);

 private:
  Checksum checksum_;
};

// The header behind a payload that `checksum` has seen, or need not have seen: of a copy.
RecordHeader seal_record(const Key& key, std::uint64_t payload_nbytes, const Seal& seal,
                         RecordChecksum& checksum);
// All checks, behind a payload that `checksum` has seen.
Damage verify_record(const Key& key, const RecordHeader& header, std::uint64_t payload_nbytes,
                     RecordChecksum& checksum);

RecordHeader pack_header(const Key& key, std::span<const std::byte> payload, const Writer& writer = {});
Damage verify_record(const Key& key, std::span<const std::byte> header, std::span<const std::byte> payload);

// The payload bytes in each of the fields in which a server holds a record: all but the last are as large as fits a size
// class of jemalloc; the last one has the header behind its bytes.
struct RecordFields {
  std::array<std::uint64_t, kMaxRecordFields> nbytes{};
  std::size_t count = 0;

  // "b", "c" and at the end "h".
  std::string_view name(std::size_t field) const { return field + 1 == count ? "h" : field == 0 ? "b" : "c"; }
};
RecordFields cut_record(std::uint64_t payload_nbytes);
// What the fields take of a server with jemalloc; not its key.
std::uint64_t record_server_nbytes(std::uint64_t payload_nbytes);

}  // namespace kvpool
