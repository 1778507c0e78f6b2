// A listing of a directory in which other programs leave what they want.
#include "store/pool_listing.h"

#include <filesystem>
#include <fstream>
#include <string>

#include "check.h"
#include "store/directory.h"

namespace kvpool {

TEST(a_listing_reads_records_and_nothing_else) {
  const test::Directory directory;
  const std::string bucket = directory.text() + "/blocks/abc/";
  std::filesystem::create_directories(bucket);
  const std::string good = "t.n." + std::string(61, '0') + "abc";
  for (const std::string& name :
       {good + ".0.0", good + ".1.1", good + ".1.0", good + ".4294967296.0", good + ".0.-1", good + ".0.0.0",
        std::string("t.n."), std::string("t.n..0.0"), std::string("t.n.abc.0.0"), std::string("t.m.") + good,
        "t.n." + std::string(61, '0') + "abg.0.0"}) {
    std::ofstream(bucket + name) << "x";
  }
  PoolListing listing(directory.text(), "t", "n", 100);
  CHECK(listing.look() == 2);
  const auto changes = listing.changes();
  CHECK(changes.size() == 2 && changes[0].group == 0 && changes[1].group == 1);
  CHECK((changes[0].came == std::vector<std::uint64_t>{0xabc}) && changes[0].went.empty());
  listing.told();
  std::filesystem::remove(bucket + good + ".1.1");
  CHECK(listing.look() == 1);
  CHECK((listing.changes()[0].went == std::vector<std::uint64_t>{0xabc}));
}

}  // namespace kvpool
