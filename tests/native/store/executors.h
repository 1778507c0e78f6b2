// What tests of executors share: keys by number, payloads, and counters.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "store/io_executor.h"

namespace kvpool::test {

using Bytes = std::vector<std::byte>;

inline Key make_key(unsigned number) {
  std::string hash = std::to_string(number);
  hash.insert(0, 16 - hash.size(), '0');
  return parse_key("kvpool:t:" + std::string(32, 'a') + ":" + hash + ":0:0");
}

inline std::vector<Key> make_keys(unsigned count) {
  std::vector<Key> keys;
  for (unsigned i = 0; i < count; ++i) keys.push_back(make_key(i));
  return keys;
}

inline Bytes make_payload(std::size_t nbytes, unsigned seed = 1) {
  std::mt19937 random(seed);
  Bytes payload(nbytes);
  for (auto& b : payload) b = static_cast<std::byte>(random());
  return payload;
}

inline std::uint64_t counter(const IoExecutor& engine, const std::string& name) {
  for (const auto& [one, value] : engine.counters()) {
    if (one == name) return value;
  }
  CHECK(false);
  return 0;
}

}  // namespace kvpool::test
