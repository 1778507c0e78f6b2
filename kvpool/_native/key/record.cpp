// Makes and checks record headers, and parses keys.
#include "key/record.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>

namespace kvpool {
namespace {

static_assert(std::endian::native == std::endian::little, "the header is written as it lies in memory");

constexpr std::string_view kPrefix = "kvpool:";
constexpr std::size_t kMaxTenantNbytes = 64;
constexpr std::size_t kNamespaceDigits = 32;
constexpr std::size_t kMinHashDigits = 16;
constexpr std::size_t kMaxHashDigits = 128;

constexpr std::uint64_t kLeastCutNbytes = 16 << 10;  // a further field costs a server about 80 bytes
constexpr std::uint64_t kMostWasted = 100;           // a field may leave a hundredth of its record unused
constexpr std::uint64_t kStringNbytes = 12;          // beside a server's string: its header of 9 and its end
constexpr std::size_t kMaxShownNbytes = 256;

[[noreturn]] void refuse(std::string_view text, const char* why) {
  std::string shown;
  for (const char c : text.substr(0, kMaxShownNbytes)) shown += (c >= 0x20 && c < 0x7f) ? c : '?';
  throw std::invalid_argument("bad key '" + shown + "': " + why);
}

bool is_tenant_char(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
}

// jemalloc has four size classes a doubling.
std::uint64_t class_step(std::uint64_t nbytes) { return std::bit_floor(nbytes) / 4; }
std::uint64_t size_class_below(std::uint64_t nbytes) { return nbytes - nbytes % class_step(nbytes); }
std::uint64_t size_class(std::uint64_t nbytes) {
  const std::uint64_t step = class_step(nbytes - 1);
  return (nbytes + step - 1) / step * step;
}

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

bool is_hex(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return hex_digit(c) >= 0; });
}

template <std::size_t N>
void decode_hex(std::string_view digits, std::array<std::uint8_t, N>& out) {
  for (std::size_t i = 0; i < N && 2 * i + 1 < digits.size(); ++i) {
    out[i] = static_cast<std::uint8_t>(hex_digit(digits[2 * i]) << 4 | hex_digit(digits[2 * i + 1]));
  }
}

// A canonical decimal of 0..65535, or -1.
int parse_u16(std::string_view text) {
  if (text.empty() || text.size() > 5 || (text.size() > 1 && text[0] == '0')) return -1;
  int value = 0;
  for (const char c : text) {
    if (c < '0' || c > '9') return -1;
    value = value * 10 + (c - '0');
  }
  return value <= 65535 ? value : -1;
}

// All checks except the checksum.
Damage check_header(const RecordHeader& header, const Key& key, std::uint64_t payload_nbytes) {
  if (header.magic != kRecordMagic) return Damage::kMagic;
  if (header.version != kRecordVersion) return Damage::kVersion;
  if (header.flags != 0) return Damage::kFlags;
  if (header.payload_nbytes != payload_nbytes) return Damage::kLength;
  if (header.fingerprint != key.fingerprint) return Damage::kFingerprint;
  if (header.hash_prefix != key.hash_prefix) return Damage::kHash;
  if (header.group != key.group) return Damage::kGroup;
  if (header.rank != key.rank) return Damage::kRank;
  return Damage::kNone;
}

}  // namespace

Key parse_key(std::string_view text) {
  if (!text.starts_with(kPrefix)) refuse(text, "it must start with 'kvpool:'");
  std::array<std::string_view, 5> parts;
  std::size_t begin = kPrefix.size();
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const std::size_t colon = text.find(':', begin);
    if ((colon == std::string_view::npos) != (i + 1 == parts.size())) {
      refuse(text, "expected kvpool:tenant:namespace:hash:group:rank");
    }
    parts[i] = text.substr(begin, colon - begin);
    begin = colon + 1;
  }
  const auto& [tenant, name_space, hash, group, rank] = parts;
  if (tenant.empty() || tenant.size() > kMaxTenantNbytes ||
      !std::all_of(tenant.begin(), tenant.end(), is_tenant_char)) {
    refuse(text, "the tenant must be 1 to 64 of A-Z a-z 0-9 _ -");
  }
  if (name_space.size() != kNamespaceDigits || !is_hex(name_space)) {
    refuse(text, "the namespace must be 32 lowercase hex digits");
  }
  if (hash.size() < kMinHashDigits || hash.size() > kMaxHashDigits || hash.size() % 2 != 0 || !is_hex(hash)) {
    refuse(text, "the hash must be 16 to 128 lowercase hex digits, an even number of them");
  }
  const int group_value = parse_u16(group);
  const int rank_value = parse_u16(rank);
  if (group_value < 0) refuse(text, "the group must be a decimal from 0 to 65535 without leading zeros");
  if (rank_value < 0) refuse(text, "the rank must be a decimal from 0 to 65535 without leading zeros");

  Key key;
  key.text = text;
  key.hash_end = static_cast<std::uint32_t>(hash.data() + hash.size() - text.data());
  key.group = static_cast<std::uint16_t>(group_value);
  key.rank = static_cast<std::uint16_t>(rank_value);
  decode_hex(name_space, key.fingerprint);
  decode_hex(hash, key.hash_prefix);
  return key;
}

std::string_view damage_name(Damage damage) {
  constexpr std::array<std::string_view, kDamageCount> kNames = {
      "none",        "truncated", "magic", "version", "flags",   "length",
      "fingerprint", "hash",      "group", "rank",    "checksum"};
  return kNames[static_cast<std::size_t>(damage)];
}

RecordHeader make_header(const Key& key, std::uint64_t payload_nbytes, const Writer& writer) {
  return RecordHeader{.magic = kRecordMagic,
                      .version = kRecordVersion,
                      .flags = 0,
                      .payload_nbytes = payload_nbytes,
                      .fingerprint = key.fingerprint,
                      .hash_prefix = key.hash_prefix,
                      .group = key.group,
                      .rank = key.rank,
                      .writer = writer,
                      .checksum = 0};
}

std::uint64_t RecordChecksum::digest(const RecordHeader& header) {
  RecordHeader zeroed = header;
  zeroed.checksum = 0;
  checksum_.update(std::as_bytes(std::span(&zeroed, 1)));
  return checksum_.digest();
}

RecordHeader seal_record(const Key& key, std::uint64_t payload_nbytes, const Seal& seal,
                         RecordChecksum& checksum) {
  RecordHeader header = make_header(key, payload_nbytes, seal.writer);
  header.checksum = seal.checksum ? *seal.checksum : checksum.digest(header);
  return header;
}

Damage verify_record(const Key& key, const RecordHeader& header, std::uint64_t payload_nbytes,
                     RecordChecksum& checksum) {
  if (const Damage damage = check_header(header, key, payload_nbytes); damage != Damage::kNone) return damage;
  return checksum.digest(header) == header.checksum ? Damage::kNone : Damage::kChecksum;
}

RecordHeader pack_header(const Key& key, std::span<const std::byte> payload, const Writer& writer) {
  RecordChecksum checksum;
  checksum.update(payload);
  return seal_record(key, payload.size(), Seal{writer, {}}, checksum);
}

Damage verify_record(const Key& key, std::span<const std::byte> header_bytes,
                     std::span<const std::byte> payload) {
  if (header_bytes.size() != kRecordHeaderNbytes) return Damage::kTruncated;
  RecordHeader header;
  std::memcpy(&header, header_bytes.data(), sizeof header);
  RecordChecksum checksum;
  checksum.update(payload);
  return verify_record(key, header, payload.size(), checksum);
}

RecordFields cut_record(std::uint64_t payload_nbytes) {
  const std::uint64_t whole = payload_nbytes + kRecordHeaderNbytes;
  RecordFields fields;
  std::uint64_t left = payload_nbytes;
  while (fields.count + 1 < kMaxRecordFields && whole >= kLeastCutNbytes) {
    const std::uint64_t last = left + kRecordHeaderNbytes + kStringNbytes;
    if ((size_class(last) - last) * kMostWasted <= whole) break;
    const std::uint64_t fitting = size_class_below(left + kStringNbytes);
    fields.nbytes[fields.count++] = fitting - kStringNbytes;
    left -= fitting - kStringNbytes;
  }
  fields.nbytes[fields.count++] = left;
  return fields;
}

std::uint64_t record_server_nbytes(std::uint64_t payload_nbytes) {
  const RecordFields fields = cut_record(payload_nbytes);
  std::uint64_t nbytes = 0;
  for (std::size_t i = 0; i < fields.count; ++i) {
    nbytes +=
        size_class(fields.nbytes[i] + (i + 1 == fields.count ? kRecordHeaderNbytes : 0) + kStringNbytes);
  }
  return nbytes;
}

}  // namespace kvpool
