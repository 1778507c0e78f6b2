// Keys and headers: golden bytes, and every kind of damage.
#include "key/record.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"

namespace kvpool {
namespace {

const std::string kNamespace = "000102030405060708090a0b0c0d0e0f";
const std::string kHash = "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff00112233445566778899aabbccddeeff";

std::string key_text(const std::string& tenant, const std::string& name_space, const std::string& hash,
                     const std::string& group, const std::string& rank) {
  return "kvpool:" + tenant + ":" + name_space + ":" + hash + ":" + group + ":" + rank;
}

bool refused(const std::string& text) {
  try {
    parse_key(text);
  } catch (const std::invalid_argument& error) {
    return std::string(error.what()).find('\n') == std::string::npos;
  }
  return false;
}

std::vector<std::byte> some_bytes(std::size_t n) {
  std::vector<std::byte> bytes(n);
  for (std::size_t i = 0; i < n; ++i) bytes[i] = static_cast<std::byte>(i * 7 + i / 251);
  return bytes;
}

}  // namespace

TEST(a_key_has_its_parts) {
  const Key key = parse_key(key_text("my-Tenant_1", kNamespace, kHash, "65535", "0"));
  CHECK(key.text.substr(key.hash_end) == ":65535:0");
  CHECK(key.group == 65535 && key.rank == 0);
  CHECK(key.fingerprint[0] == 0x00 && key.fingerprint[15] == 0x0f);
  CHECK(key.hash_prefix[0] == 0xf0 && key.hash_prefix[19] == 0x33);
  const Key shorter = parse_key(key_text("t", kNamespace, "ffeeddccbbaa9988", "0", "7"));
  CHECK(shorter.hash_prefix[7] == 0x88 && shorter.hash_prefix[8] == 0 && shorter.hash_prefix[19] == 0);
}

TEST(a_bad_key_is_refused) {
  CHECK(!refused(key_text("t", kNamespace, kHash, "0", "0")));
  CHECK(!refused(key_text(std::string(64, 'a'), kNamespace, std::string(128, 'a'), "0", "0")));
  for (const char* text :
       {"", "kvpool", "kvpool:", "kvpool:::::", "KVPOOL:t:n:h:0:0", "kvpool:t:n:h:0", "x"}) {
    CHECK(refused(text));
  }
  const std::string good = key_text("t", kNamespace, kHash, "0", "0");
  CHECK(refused(good + ":"));
  CHECK(refused(good + ":0"));
  CHECK(refused(good + "\n"));
  CHECK(refused(" " + good));
  CHECK(refused(good + std::string(1, '\0')));
  for (const std::string& tenant :
       {std::string(), std::string(65, 'a'), std::string("a b"), std::string("a/b"), std::string(".."),
        std::string("a\0b", 3), std::string("\xc3\xa9")}) {
    CHECK(refused(key_text(tenant, kNamespace, kHash, "0", "0")));
  }
  for (const std::string& name_space :
       {std::string(), kNamespace.substr(1), kNamespace + "0", std::string(32, 'A'), std::string(32, 'g')}) {
    CHECK(refused(key_text("t", name_space, kHash, "0", "0")));
  }
  for (const std::string& hash : {std::string(), std::string(14, 'a'), std::string(17, 'a'),
                                  std::string(130, 'a'), std::string(16, 'F'), std::string(15, 'a') + "/"}) {
    CHECK(refused(key_text("t", kNamespace, hash, "0", "0")));
  }
  for (const char* number :
       {"", "00", "01", "-1", "+1", "65536", "99999", "100000", "1.", "a", " 1", "0x1"}) {
    CHECK(refused(key_text("t", kNamespace, kHash, number, "0")));
    CHECK(refused(key_text("t", kNamespace, kHash, "0", number)));
  }
}

TEST(the_header_is_golden) {
  const Key key = parse_key(key_text("t", kNamespace, kHash, "258", "3"));
  const std::vector<std::byte> payload = some_bytes(1000);
  const RecordHeader header = pack_header(key, payload);
  const std::uint8_t expected[56] = {
      'K',  'V',  'P',  'R',                        // magic
      2,    0,                                      // version
      0,    0,                                      // flags
      0xe8, 0x03, 0,    0,    0,    0,    0,    0,  // payload_nbytes
      0x00, 0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07,
      0x08, 0x09, 0x0a, 0x0b, 0x0c, 0x0d, 0x0e, 0x0f,  // fingerprint
      0xf0, 0xf1, 0xf2, 0xf3, 0xf4, 0xf5, 0xf6, 0xf7,
      0xf8, 0xf9, 0xfa, 0xfb, 0xfc, 0xfd, 0xfe, 0xff,  // hash
      0x00, 0x11, 0x22, 0x33,                          // hash, to 20 bytes
      2,    1,                                         // group
      3,    0,                                         // rank
  };
  CHECK(std::memcmp(&header, expected, sizeof expected) == 0);
  // python-xxhash: xxh3_64_intdigest(payload + header with 8 zero bytes at 72)
  CHECK(header.checksum == 0x1f4c810f9f6b40f4U);
}

TEST(each_damage_has_its_name) {
  const Key key = parse_key(key_text("t", kNamespace, kHash, "2", "3"));
  std::vector<std::byte> payload = some_bytes(300'000);
  const RecordHeader good = pack_header(key, payload);
  const auto verdict = [&](const RecordHeader& header) {
    return verify_record(key, std::as_bytes(std::span(&header, 1)), payload);
  };
  CHECK(verdict(good) == Damage::kNone);
  CHECK(verify_record(key, std::as_bytes(std::span(&good, 1)).first(79), payload) == Damage::kTruncated);
  const auto with = [&](auto change) {
    RecordHeader header = good;
    change(header);
    return damage_name(verdict(header));
  };
  CHECK(with([](RecordHeader& h) { h.magic[3] = 'r'; }) == "magic");
  CHECK(with([](RecordHeader& h) { h.version = 1; }) == "version");
  CHECK(with([](RecordHeader& h) { h.flags = 1; }) == "flags");
  CHECK(with([](RecordHeader& h) { h.payload_nbytes += 1; }) == "length");
  CHECK(with([](RecordHeader& h) { h.fingerprint[15] ^= 1; }) == "fingerprint");
  CHECK(with([](RecordHeader& h) { h.hash_prefix[19] ^= 1; }) == "hash");
  CHECK(with([](RecordHeader& h) { h.group = 1; }) == "group");
  CHECK(with([](RecordHeader& h) { h.rank = 1; }) == "rank");
  CHECK(with([](RecordHeader& h) { h.writer[15] = 1; }) == "checksum");
  CHECK(with([](RecordHeader& h) { h.checksum ^= 1; }) == "checksum");
  for (const std::size_t at : {std::size_t{0}, payload.size() / 2, payload.size() - 1}) {
    payload[at] ^= std::byte{1};
    CHECK(verdict(good) == Damage::kChecksum);
    payload[at] ^= std::byte{1};
  }
  CHECK(verdict(good) == Damage::kNone);
}

TEST(the_checksum_does_not_depend_on_the_chunks) {
  const std::vector<std::byte> data = some_bytes(1'000'003);
  Checksum whole;
  whole.update(data);
  for (const std::size_t step : {1UL, 63UL, 64UL, 1024UL, 262144UL}) {
    Checksum parts;
    for (std::size_t i = 0; i < data.size(); i += step) {
      parts.update(std::span(data).subspan(i, std::min(step, data.size() - i)));
    }
    CHECK(parts.digest() == whole.digest());
  }
}

}  // namespace kvpool
