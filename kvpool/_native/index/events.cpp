#include "index/events.h"

#include <array>
#include <span>
#include <string_view>

namespace kvpool {
namespace {

// First bytes in msgpack (github.com/msgpack/msgpack/blob/master/spec.md).
constexpr std::uint8_t kFixMap = 0x80, kFixArray = 0x90, kFixStr = 0xa0, kNil = 0xc0, kNegative = 0xe0;
constexpr std::uint8_t kBin8 = 0xc4, kUint8 = 0xcc, kUint64 = 0xcf, kInt8 = 0xd0, kInt64 = 0xd3;
constexpr std::uint8_t kStr8 = 0xd9, kArray16 = 0xdc, kMap16 = 0xde, kMap32 = 0xdf;

constexpr std::uint8_t kVaries = 0xff;

constexpr std::string_view kOwner = "kvpool";  // kvpool/vllm/tell/events.py

// Bytes behind the first of a scalar; kVaries for values with a length, for containers, and for 0xc1.
constexpr std::array<std::uint8_t, 256> kScalarNbytes = [] {
  std::array<std::uint8_t, 256> nbytes{};
  for (unsigned first = kFixMap; first < kNil; ++first) nbytes[first] = kVaries;
  for (unsigned first = 0xc1; first < kNegative; ++first) nbytes[first] = kVaries;
  nbytes[0xc2] = nbytes[0xc3] = 0;  // false, true
  nbytes[0xca] = 4;                 // float 32
  nbytes[0xcb] = 8;                 // float 64
  for (unsigned i = 0; i < 4; ++i) {
    nbytes[kUint8 + i] = nbytes[kInt8 + i] = static_cast<std::uint8_t>(1U << i);
  }
  return nbytes;
}();

class Reader {
 public:
  explicit Reader(std::span<const std::byte> data)
      : begin_(reinterpret_cast<const std::uint8_t*>(data.data())), at_(begin_), end_(begin_ + data.size()) {}

  [[noreturn]] void fail(std::string_view what) const {
    throw MalformedEvents(std::string(what) + " at byte " + std::to_string(at_ - begin_));
  }
  bool at_end() const { return at_ == end_; }

  bool at_nil() const { return at_ != end_ && *at_ == kNil; }

  bool take_nil() {
    if (!at_nil()) return false;
    ++at_;
    return true;
  }

  bool at_array() const {
    return at_ != end_ && ((*at_ & 0xf0U) == kFixArray || *at_ == kArray16 || *at_ == kArray16 + 1);
  }

  std::size_t array(std::string_view what) { return container(what, kFixArray, kArray16, 1); }
  std::size_t map(std::string_view what) { return container(what, kFixMap, kMap16, 2); }

  std::string_view text(std::string_view what) {
    const std::uint8_t first = byte();
    std::size_t nbytes = 0;
    if (first >= kFixStr && first < kNil) {
      nbytes = first & 0x1fU;
    } else if (first >= kStr8 && first < kArray16) {
      nbytes = big_endian(std::size_t{1} << (first - kStr8));
    } else {
      --at_;
      fail(std::string(what) + " is not text");
    }
    const std::uint8_t* data = take(nbytes);
    return {reinterpret_cast<const char*>(data), nbytes};
  }

  std::uint64_t number(std::string_view what) {
    const std::uint8_t first = byte();
    if (first < kFixMap) return first;
    if (first >= kUint8 && first <= kUint64) return big_endian(std::size_t{1} << (first - kUint8));
    if (first >= kInt8 && first <= kInt64) {  // a signed type with a non-negative value: legal
      const std::size_t nbytes = std::size_t{1} << (first - kInt8);
      const std::uint64_t value = big_endian(nbytes);
      if (value >> (8 * nbytes - 1) == 0) return value;
    }
    --at_;
    fail(std::string(what) + " is not a whole number from 0");
  }

  // An integer, or at least 8 bytes whose last 8 are a big-endian integer.
  std::uint64_t hash() {
    if (at_ != end_ && *at_ >= kBin8 && *at_ < kBin8 + 3) {
      const std::uint8_t first = byte();
      const std::size_t nbytes = big_endian(std::size_t{1} << (first - kBin8));
      const std::uint8_t* data = take(nbytes);
      if (nbytes < 8 || nbytes > kMaxHashNbytes) fail("a block hash has not 8 to 64 bytes");
      return load_big_endian(data + nbytes - 8, 8);
    }
    return number("a block hash");
  }

  // Skips one value of any kind.
  void skip() {
    std::array<std::uint64_t, kMaxNesting> pending;
    unsigned depth = 0;
    pending[0] = 1;
    for (;;) {
      while (pending[depth] == 0) {
        if (depth == 0) return;
        --depth;
      }
      // Most of a batch are token ids: a tight loop over scalars, checked once behind it.
      const auto nbytes = static_cast<std::size_t>(end_ - at_);
      std::size_t passed = 0;
      std::uint64_t left = pending[depth];
      while (left != 0 && passed < nbytes && kScalarNbytes[at_[passed]] != kVaries) {
        passed += std::size_t{1} + kScalarNbytes[at_[passed]];
        --left;
      }
      take(passed);
      pending[depth] = left;
      if (left == 0) continue;
      --pending[depth];
      const std::uint8_t first = byte();
      const std::uint64_t items = skip_head(first);
      if (items == 0) continue;
      if (items > static_cast<std::uint64_t>(end_ - at_)) fail("the batch ends too early");
      if (++depth == kMaxNesting) fail("values are nested too deeply");
      pending[depth] = items;
    }
  }

 private:
  static constexpr std::size_t kMaxHashNbytes = 64;

  std::uint8_t byte() { return *take(1); }

  const std::uint8_t* take(std::size_t nbytes) {
    if (nbytes > static_cast<std::size_t>(end_ - at_)) fail("the batch ends too early");
    const std::uint8_t* data = at_;
    at_ += nbytes;
    return data;
  }

  static std::uint64_t load_big_endian(const std::uint8_t* data, std::size_t nbytes) {
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < nbytes; ++i) value = value << 8 | data[i];
    return value;
  }
  std::uint64_t big_endian(std::size_t nbytes) { return load_big_endian(take(nbytes), nbytes); }

  std::size_t container(std::string_view what, std::uint8_t fix, std::uint8_t wide, std::size_t per_item) {
    const std::uint8_t first = byte();
    std::uint64_t count = 0;
    if ((first & 0xf0U) == fix) {
      count = first & 0x0fU;
    } else if (first == wide || first == wide + 1) {
      count = big_endian(first == wide ? 2 : 4);
    } else {
      --at_;
      fail(std::string(what) + " has the wrong type");
    }
    // Every value has at least one byte: an impossible count never becomes an allocation.
    if (count * per_item > static_cast<std::uint64_t>(end_ - at_)) fail("the batch ends too early");
    return static_cast<std::size_t>(count);
  }

  // Skips the bytes behind `first`; returns the number of values inside, for a container.
  std::uint64_t skip_head(std::uint8_t first) {
    if (first < kFixArray) return 2ULL * (first & 0x0fU);
    if (first < kFixStr) return first & 0x0fU;
    if (first < kNil) return take(first & 0x1fU), 0;
    if (first >= kBin8 && first < kBin8 + 3) return take(big_endian(std::size_t{1} << (first - kBin8))), 0;
    if (first >= 0xc7 && first < 0xca) {  // an extension: length, type, data
      return take(1 + big_endian(std::size_t{1} << (first - 0xc7))), 0;
    }
    if (first >= 0xd4 && first < kStr8) return take(1 + (std::size_t{1} << (first - 0xd4))), 0;
    if (first >= kStr8 && first < kArray16) return take(big_endian(std::size_t{1} << (first - kStr8))), 0;
    if (first >= kArray16 && first < kMap16) return big_endian(first == kArray16 ? 2 : 4);
    if (first == kMap16 || first == kMap32) return 2 * big_endian(first == kMap16 ? 2 : 4);
    --at_;
    fail("a byte that msgpack does not use");
  }

  const std::uint8_t* begin_;
  const std::uint8_t* at_;
  const std::uint8_t* end_;
};

std::optional<Tier> tier_of(std::string_view medium) {
  if (medium == "GPU") return Tier::kDevice;
  if (medium == "CPU") return Tier::kHost;
  if (medium == "DISK") return Tier::kDisk;
  if (medium == "STORAGE") return Tier::kPool;
  return std::nullopt;
}

// KVCacheSpecKind in vllm/v1/kv_cache_interface.py. An unknown kind needs every block: that only lowers credits.
Reach reach_of(std::string_view kind) {
  if (kind == "sliding_window" || kind == "sliding_window_mla") return Reach::kWindow;
  if (kind == "mamba") return Reach::kState;
  if (kind == "chunked_local_attention") return Reach::kPart;
  return Reach::kWhole;
}

// Before vLLM 0.24 an event is an array: its type, then its fields, in their historical order.
constexpr std::array<std::string_view, 11> kStoredFields = {"block_hashes",
                                                            "parent_block_hash",
                                                            "token_ids",
                                                            "block_size",
                                                            "lora_id",
                                                            "medium",
                                                            "lora_name",
                                                            "extra_keys",
                                                            "group_idx",
                                                            "kv_cache_spec_kind",
                                                            "kv_cache_spec_sliding_window"};
constexpr std::array<std::string_view, 3> kRemovedFields = {"block_hashes", "medium", "group_idx"};

class Decoder {
 public:
  explicit Decoder(std::span<const std::byte> payload) : reader_(payload) {}

  EventBatch decode() {
    const std::size_t parts = reader_.array("the batch");
    if (parts < 2) reader_.fail("a batch has a timestamp and events");
    reader_.skip();  // the timestamp
    const std::size_t events = reader_.array("the list of events");
    if (events > kMaxBatchEvents) reader_.fail("a batch has too many events");
    batch_.events.reserve(events);
    for (std::size_t i = 0; i < events; ++i) read_event();
    if (parts > 2 && !reader_.take_nil()) batch_.dp_rank = small("data_parallel_rank", kMaxDpRank);
    for (std::size_t i = 3; i < parts; ++i) reader_.skip();
    if (!reader_.at_end()) reader_.fail("something follows the batch");
    return std::move(batch_);
  }

 private:
  std::uint32_t small(std::string_view what, std::uint32_t max) {
    const std::uint64_t value = reader_.number(what);
    if (value > max) reader_.fail(std::string(what) + " is too large");
    return static_cast<std::uint32_t>(value);
  }

  // An event, and its fields read so far.
  struct Reading {
    Event event{};
    bool known = true, has_type = false, has_hashes = false, has_parent = false, has_medium = false;
    bool looks_ahead = false, owned = false;
  };

  void read_event() {
    Reading reading;
    reading.event.begin = batch_.hashes.size();
    if (reader_.at_array()) {
      read_array(reading);
    } else {
      const std::size_t fields = reader_.map("an event");
      for (std::size_t i = 0; i < fields; ++i) read_field(reader_.text("the name of a field"), reading);
    }
    add_event(reading);
  }

  void read_array(Reading& reading) {
    const std::size_t count = reader_.array("an event");
    if (count == 0) return;  // refused: it has no type
    read_field("type", reading);
    std::span<const std::string_view> names;
    if (reading.event.kind == Event::Kind::kStored) names = kStoredFields;
    if (reading.event.kind == Event::Kind::kRemoved) names = kRemovedFields;
    for (std::size_t i = 1; i < count; ++i) read_field(i <= names.size() ? names[i - 1] : "", reading);
  }

  void read_field(std::string_view name, Reading& reading) {
    Event& event = reading.event;
    if (name == "type") {
      if (reading.has_type) reader_.fail("an event has two types");
      reading.has_type = true;
      const std::string_view type = reader_.text("type");
      if (type == "BlockStored") {
        event.kind = Event::Kind::kStored;
      } else if (type == "BlockRemoved") {
        event.kind = Event::Kind::kRemoved;
      } else if (type == "AllBlocksCleared") {
        event.kind = Event::Kind::kCleared;
      } else {
        reading.known = false;
      }
    } else if (!reading.known) {
      reader_.skip();
    } else if (name == "block_hashes") {
      if (reading.has_hashes) reader_.fail("an event has two lists of hashes");
      reading.has_hashes = true;
      read_hashes();
    } else if (name == "parent_block_hash") {
      reading.has_parent = !reader_.take_nil();
      if (reading.has_parent) reader_.hash();
    } else if (name == "medium") {
      if (reader_.take_nil()) return;
      reading.has_medium = true;
      const std::optional<Tier> tier = tier_of(reader_.text("medium"));
      reading.known = tier.has_value();
      if (reading.known) event.tier = *tier;
    } else if (name == "group_idx") {
      if (!reader_.take_nil()) event.group = small("group_idx", kMaxGroup);
    } else if (name == "kv_cache_spec_kind") {
      if (!reader_.take_nil()) event.reach = reach_of(reader_.text("kv_cache_spec_kind"));
    } else if (name == "kv_cache_spec_sliding_window") {
      if (!reader_.take_nil()) event.window_tokens = small("kv_cache_spec_sliding_window", kMaxTokens);
    } else if (name == "block_size") {
      if (!reader_.take_nil()) event.block_tokens = small("block_size", kMaxTokens);
    } else if (name == "ownership") {
      reading.owned = !reader_.take_nil() && reader_.text("ownership") == kOwner;
    } else {
      reading.looks_ahead |= name == "lookahead_token_ids" && !reader_.at_nil();
      reader_.skip();
    }
  }

  void add_event(Reading& reading) {
    Event& event = reading.event;
    if (!reading.has_type) reader_.fail("an event has no type");
    if (reading.known && event.kind == Event::Kind::kCleared) {
      event.device_only = reading.has_medium;
      reading.known = event.tier == Tier::kDevice;  // no engine clears another tier alone
    } else if (reading.known && !reading.has_hashes) {
      reader_.fail("an event has no block_hashes");
    }
    if (!reading.known) {
      batch_.hashes.resize(event.begin);
      ++batch_.skipped_events;
      return;
    }
    if (reading.looks_ahead) ++batch_.lookahead_events;
    event.root = !reading.has_parent;
    event.near = reading.owned && (event.tier == Tier::kHost || event.tier == Tier::kDisk);
    event.count = batch_.hashes.size() - event.begin;
    batch_.events.push_back(event);
  }

  void read_hashes() {
    const std::size_t count = reader_.array("block_hashes");
    if (count > kMaxBatchHashes - batch_.hashes.size()) reader_.fail("a batch has too many hashes");
    for (std::size_t i = 0; i < count; ++i) batch_.hashes.push_back(reader_.hash());
  }

  Reader reader_;
  EventBatch batch_;
};

}  // namespace

EventBatch decode_events(std::span<const std::byte> payload) {
  if (payload.size() > kMaxPayloadNbytes) throw MalformedEvents("a batch has more than 64 MiB");
  return Decoder(payload).decode();
}

}  // namespace kvpool
