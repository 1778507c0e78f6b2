// Event batches: good ones, cut ones, wrong ones.
#include "index/events.h"

#include <cstdint>
#include <random>
#include <string>
#include <string_view>

#include "check.h"

namespace kvpool {
namespace {

using std::string_literals::operator""s;

EventBatch decode(std::string_view payload) { return decode_events(std::as_bytes(std::span(payload))); }

std::string text(std::string_view value) {
  return std::string(1, static_cast<char>(0xa0 + value.size())) + std::string(value);
}

// [0, [`events`, which are `count`]]
std::string batch(int count, const std::string& events) {
  return "\x92\x00"s + static_cast<char>(0x90 + count) + events;
}

std::string map(int fields, const std::string& items) { return static_cast<char>(0x80 + fields) + items; }

const std::string kHashesOneTwo = text("block_hashes") + "\x92\x01\x02"s;
const std::string kStored = text("type") + text("BlockStored");
const std::string kRemoved = text("type") + text("BlockRemoved");

}  // namespace

TEST(events_of_every_type_are_decoded) {
  const EventBatch got = decode(
      "\x93\xcb\0\0\0\0\0\0\0\0"s + "\x93"s +
      map(10, kStored + kHashesOneTwo + text("parent_block_hash") + "\x07"s + text("token_ids") +
                  "\x93\x01\xcd\x01\x02\xce\0\0\0\x01"s + text("block_size") + "\x10"s + text("medium") +
                  text("CPU") + text("group_idx") + "\x03"s + "\xb2kv_cache_spec_kind"s +
                  text("sliding_window") + "\xbckv_cache_spec_sliding_window\xcd\x02\0"s +
                  text("extra_keys") + "\x91\x92\xa1x\x81\xa1y\xc0"s) +
      map(2, kRemoved + text("block_hashes") + "\x91\xcf\xff\0\0\0\0\0\0\x01"s) +
      map(1, text("type") + "\xb0" + "AllBlocksCleared"s) + "\xcd\x01\0"s);
  CHECK(got.events.size() == 3 && got.skipped_events == 0 && got.dp_rank == 256);
  CHECK((got.hashes == std::vector<std::uint64_t>{1, 2, 0xff00000000000001ULL}));
  const Event& stored = got.events[0];
  CHECK(stored.kind == Event::Kind::kStored && stored.tier == Tier::kHost && stored.group == 3);
  CHECK(stored.reach == Reach::kWindow && !stored.root && stored.begin == 0 && stored.count == 2);
  CHECK(stored.block_tokens == 16 && stored.window_tokens == 512);
  const Event& removed = got.events[1];
  CHECK(removed.kind == Event::Kind::kRemoved && removed.tier == Tier::kDevice && removed.group == 0);
  CHECK(removed.begin == 2 && removed.count == 1);
  CHECK(got.events[2].kind == Event::Kind::kCleared);
}

TEST(events_of_versions_before_maps_are_decoded) {
  const std::string stored_head = text("BlockStored") + "\x92\x01\x02\x07\x93\x01\x02\x03\x10\xc0"s;
  const std::string stored_in_full =
      "\x9c"s + stored_head + text("CPU") + "\xa1l\xc0\x03"s + text("sliding_window") + "\xcd\x02\0"s;
  const std::string removed = "\x94"s + text("BlockRemoved") + "\x91\x05"s + text("GPU") + "\x02"s;
  const std::string cleared = "\x91\xb0"s + "AllBlocksCleared"s;
  const std::string of_the_first = "\x96"s + stored_head;  // no medium yet
  const std::string unknown = "\x93"s + text("BlockDreamt") + "\x01\x02"s;
  const std::string longer = "\x96"s + text("BlockRemoved") + "\x91\x05\xc0\xc0\x91\xc0\x01"s;
  const EventBatch got =
      decode(batch(6, stored_in_full + removed + cleared + of_the_first + unknown + longer));
  CHECK(got.events.size() == 5 && got.skipped_events == 1 && got.lookahead_events == 0);
  CHECK((got.hashes == std::vector<std::uint64_t>{1, 2, 5, 1, 2, 5}));
  const Event& stored = got.events[0];
  CHECK(stored.kind == Event::Kind::kStored && stored.tier == Tier::kHost && stored.group == 3);
  CHECK(stored.reach == Reach::kWindow && !stored.root && stored.begin == 0 && stored.count == 2);
  CHECK(stored.block_tokens == 16 && stored.window_tokens == 512);
  CHECK(got.events[1].kind == Event::Kind::kRemoved && got.events[1].group == 2);
  CHECK(got.events[2].kind == Event::Kind::kCleared && !got.events[2].device_only);
  CHECK(got.events[3].kind == Event::Kind::kStored && got.events[3].tier == Tier::kDevice);
  const std::string faults[] = {
      "\x91\xc0"s,                                                   // no type
      "\x91"s + text("BlockStored"),                                 // no hashes
      "\x92"s + text("BlockRemoved") + "\xc0"s,                      // no list
      "\x93"s + text("BlockRemoved") + "\x91\x05\x07"s,              // a medium that is no text
      "\xdd\xff\xff\xff\xff"s + text("BlockRemoved") + "\x91\x05"s,  // more than there is
  };
  for (const std::string& fault : faults) CHECK_THROWS(MalformedEvents, decode(batch(1, fault)));
}

TEST(hashes_that_cover_tokens_behind_their_block_are_counted) {
  const std::string lookahead = "\xb3lookahead_token_ids"s;
  const auto of = [&](const std::string& value) {
    return decode(batch(1, map(3, kStored + kHashesOneTwo + lookahead + value)));
  };
  CHECK(of("\x92\x91\x05\x91\x06"s).lookahead_events == 1 && of("\x90"s).lookahead_events == 1);
  CHECK(of("\xc0"s).lookahead_events == 0);
  const std::string odd = map(2, text("type") + text("BlockDreamt") + lookahead + "\x91\x91\x05"s);
  CHECK(decode(batch(1, odd)).lookahead_events == 0);
}

TEST(a_clear_may_name_the_device_and_no_other_tier) {
  const std::string type = text("type") + "\xb0" + "AllBlocksCleared"s;
  const auto of = [&](const std::string& medium) {
    return decode(batch(1, map(2, text("medium") + medium + type)));
  };
  CHECK(of(text("GPU")).events.at(0).device_only);
  CHECK(!of("\xc0"s).events.at(0).device_only);
  for (const char* other : {"CPU", "DISK", "STORAGE", "TAPE"}) {
    CHECK(of(text(other)).events.empty() && of(text(other)).skipped_events == 1);
  }
}

TEST(hashes_are_integers_or_the_end_of_bytes) {
  const std::string digest = "\xc4\x20"s + std::string(24, 'x') + "\x01\x02\x03\x04\x05\x06\x07\x08"s;
  const EventBatch got = decode(
      batch(1, map(2, kStored + text("block_hashes") + "\x92"s + digest + "\xd3"s + "\0\0\0\0\0\0\0\x09"s)));
  CHECK((got.hashes == std::vector<std::uint64_t>{0x0102030405060708ULL, 9}));
  CHECK(got.events[0].root);
  const std::string head = kStored + text("block_hashes") + "\x91"s;
  CHECK_THROWS(MalformedEvents, decode(batch(1, map(2, head + "\xc4\x07seven.."s))));
  CHECK_THROWS(MalformedEvents, decode(batch(1, map(2, head + "\xc4\x41"s + std::string(65, 'x')))));
  CHECK_THROWS(MalformedEvents, decode(batch(1, map(2, head + "\xff"s))));
  CHECK_THROWS(MalformedEvents, decode(batch(1, map(2, head + "\xd0\x80"s))));
  CHECK_THROWS(MalformedEvents, decode(batch(1, map(2, head + "\xc0"s))));
}

TEST(what_is_not_known_is_skipped_and_counted) {
  const std::string odd = map(2, text("type") + text("BlockDreamt") + text("block_hashes") + "\xa1?"s);
  const std::string medium = map(3, text("medium") + text("TAPE") + kStored + kHashesOneTwo);
  const std::string late = map(3, kHashesOneTwo + text("medium") + "\xc0"s + kRemoved);
  const EventBatch got = decode(batch(3, odd + medium + late));
  CHECK(got.skipped_events == 2 && got.events.size() == 1 && got.hashes.size() == 2);
  CHECK(got.events[0].kind == Event::Kind::kRemoved && got.events[0].begin == 0);
  // Further parts of a batch, and every kind of value in a field that is not ours.
  const std::string values[] = {"\xc0"s,
                                "\xc2"s,
                                "\xc3"s,
                                "\x7f"s,
                                "\xe0"s,
                                "\xca\0\0\0\0"s,
                                "\xd2\0\0\0\0"s,
                                "\xd9\x02hi"s,
                                "\xda\0\x01h"s,
                                "\xdb\0\0\0\x01h"s,
                                "\xc4\x01h"s,
                                "\xc5\0\x01h"s,
                                "\xc6\0\0\0\x01h"s,
                                "\xc7\x01\x05h"s,
                                "\xc8\0\x01\x05h"s,
                                "\xc9\0\0\0\x01\x05h"s,
                                "\xd4\x05h"s,
                                "\xd5\x05hh"s,
                                "\xd8\x05"s + std::string(16, 'h'),
                                "\x90"s,
                                "\x91\x91\xc0"s,
                                "\xdc\0\x01\xc0"s,
                                "\xdd\0\0\0\x01\xc0"s,
                                "\x81\xc0\xc0"s,
                                "\xde\0\x01\xc0\xc0"s,
                                "\xdf\0\0\0\x01\xc0\xc0"s};
  for (const std::string& value : values) {
    const std::string fields = map(3, kRemoved + text("novelty") + value + kHashesOneTwo);
    CHECK(decode(batch(1, fields)).hashes.size() == 2);
    CHECK(decode("\x95"s + batch(0, "").substr(1) + "\xc0"s + value + value).events.empty());
  }
}

TEST(malformed_batches_are_refused) {
  const std::string removed = map(2, kRemoved + kHashesOneTwo);
  CHECK(decode(batch(1, removed)).events.size() == 1);
  const std::string faults[] = {
      ""s,
      "\xc0"s,
      "\x90"s,
      "\x91\x00"s,
      "\x80"s,
      "\x92\x00\xc0"s,
      "\x92\xc1\x90"s,
      batch(1, removed) + "\xc0"s,  // something behind it
      batch(2, removed),
      batch(1, ""),
      batch(1, "\xc0"),
      batch(1, "\x90"),
      batch(1, map(0, "")),                                        // no type
      batch(1, map(1, kRemoved)),                                  // no hashes
      batch(1, map(3, kRemoved + kRemoved + kHashesOneTwo)),       // two types
      batch(1, map(3, kRemoved + kHashesOneTwo + kHashesOneTwo)),  // two lists
      batch(1, map(2, kRemoved + text("block_hashes") + "\xc0"s)),
      batch(1, map(2, kRemoved + text("block_hashes") + "\xdd\xff\xff\xff\xff"s)),
      batch(1, map(3, kRemoved + kHashesOneTwo + text("medium") + "\x01"s)),
      batch(1, map(3, kRemoved + kHashesOneTwo + text("group_idx") + "\xce\0\x01\0\0"s)),
      batch(1, map(3, kRemoved + kHashesOneTwo + text("x") + "\xc1"s)),
      batch(1, map(3, kRemoved + kHashesOneTwo + text("x") + "\xdf\xff\xff\xff\xff"s)),
      batch(1, map(3, kRemoved + kHashesOneTwo + text("x") + std::string(kMaxNesting, '\x91') + "\xc0"s)),
      "\x93\x00\x90\xa1x"s,
      "\x93\x00\x90\xce\0\x01\0\0"s,  // no rank
      "\x92\x00\xdd\xff\xff\xff\xff"s,
  };
  for (const std::string& fault : faults) CHECK_THROWS(MalformedEvents, decode(fault));
  const std::string deep = std::string(kMaxNesting - 1, '\x91') + "\xc0"s;
  CHECK(decode(batch(1, map(3, kRemoved + kHashesOneTwo + text("x") + deep))).events.size() == 1);
  CHECK_THROWS(MalformedEvents, decode(std::string(kMaxPayloadNbytes + 1, '\0')));
}

TEST(damaged_batches_never_read_beyond_their_end) {
  const std::string good =
      batch(2, map(4, kStored + kHashesOneTwo + text("token_ids") + "\x93\xcd\x01\x02\x05\xce\0\0\0\x01"s +
                          text("medium") + text("GPU")) +
                   map(2, kRemoved + kHashesOneTwo));
  CHECK(decode(good).events.size() == 2);
  const std::string array = batch(1, "\x94"s + text("BlockStored") + "\x92\x01\x02\x07\x92\x01\x02"s);
  CHECK(decode(array).events.size() == 1);
  for (std::size_t nbytes = 0; nbytes < array.size(); ++nbytes) {
    const std::vector<char> cut(array.begin(), array.begin() + static_cast<std::ptrdiff_t>(nbytes));
    CHECK_THROWS(MalformedEvents, decode(std::string_view(cut.data(), cut.size())));
  }
  for (std::size_t nbytes = 0; nbytes < good.size(); ++nbytes) {
    // A copy of exactly this length, so that the sanitizer sees its end.
    const std::vector<char> cut(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(nbytes));
    CHECK_THROWS(MalformedEvents, decode(std::string_view(cut.data(), cut.size())));
  }
  std::mt19937_64 chance(5);
  for (int round = 0; round < 50'000; ++round) {
    std::vector<char> bytes(good.begin(), good.end());
    if (round % 2 == 0) bytes.resize(chance() % 64);
    for (std::uint64_t flips = 1 + chance() % 4; flips != 0 && !bytes.empty(); --flips) {
      bytes[chance() % bytes.size()] = static_cast<char>(chance());
    }
    try {
      decode(std::string_view(bytes.data(), bytes.size()));
    } catch (const MalformedEvents&) {
    }
  }
}

}  // namespace kvpool
