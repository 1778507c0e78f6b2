// A record: a 64-byte header before the payload, which proves that these bytes belong to the key.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "key/checksum.h"

namespace kvpool {

inline constexpr std::size_t kRecordHeaderNbytes = 64;
inline constexpr std::array<char, 4> kRecordMagic = {'K', 'V', 'P', 'R'};
inline constexpr std::uint16_t kRecordVersion = 1;
// The data path hashes in steps of this size, so that a chunk is hashed while in the cache.
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
  std::uint16_t version;                     //  4: 1; fixes the checksum's algorithm
  std::uint16_t flags;                       //  6: 0; reserved
  std::uint64_t payload_nbytes;              //  8
  std::array<std::uint8_t, 16> fingerprint;  // 16: of the namespace
  std::array<std::uint8_t, 20> hash_prefix;  // 32: first 20 bytes of the block hash, zero padded
  std::uint16_t group;                       // 52
  std::uint16_t rank;                        // 54
  std::uint64_t checksum;                    // 56: XXH3-64 over this header with 0 here, then the payload
};
static_assert(sizeof(RecordHeader) == kRecordHeaderNbytes);

// Damage of a record, in the order of the checks.
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

// The header for this key and length, with a checksum of zero.
RecordHeader make_header(const Key& key, std::uint64_t payload_nbytes);

// All checks except the checksum.
Damage check_header(const RecordHeader& header, const Key& key, std::uint64_t payload_nbytes);

// Streams the checksum of a record: the header first, then the payload by chunks.
class RecordChecksum {
 public:
  explicit RecordChecksum(const RecordHeader& header);  // ignores header.checksum
  void update(std::span<const std::byte> chunk) { checksum_.update(chunk); }
  std::uint64_t digest() const { return checksum_.digest(); }

 private:
  Checksum checksum_;
};

RecordHeader pack_header(const Key& key, std::span<const std::byte> payload);
Damage verify_record(const Key& key, std::span<const std::byte> header, std::span<const std::byte> payload);

}  // namespace kvpool
