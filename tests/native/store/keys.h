// Keys by number, as the tests of servers name them.
#pragma once

#include <string>

#include "key/record.h"

namespace kvpool::test {

inline Key make_key(unsigned number) {
  std::string hash = std::to_string(number);
  hash.insert(0, 16 - hash.size(), '0');
  return parse_key("kvpool:t:" + std::string(32, 'a') + ":" + hash + ":0:0");
}

}  // namespace kvpool::test
