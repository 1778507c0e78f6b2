// Which records are refused, and when one is tried again.
#include "store/refused_size.h"

#include "check.h"

namespace kvpool {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kNbytes = 4 << 20;
const Clock::time_point kStart{};

TEST(a_server_that_says_why_is_believed_at_once) {
  RefusedSize refused;
  refused.ended(kNbytes, "why", true, kStart);
  CHECK(refused.why(kNbytes, kStart + 1ms) == "why");
  CHECK(refused.why(kNbytes + 1, kStart + 1ms) == "why");
  CHECK(refused.why(kNbytes - 1, kStart + 1ms).empty());
}

TEST(a_silent_end_is_believed_the_second_time_and_only_of_large_records) {
  RefusedSize refused;
  refused.ended(kNbytes, "first", false, kStart);
  CHECK(refused.why(kNbytes, kStart).empty());
  refused.ended(1000, "small", false, kStart);
  refused.ended(1000, "small", false, kStart);
  CHECK(refused.why(kNbytes, kStart).empty());
  refused.ended(kNbytes, "second", false, kStart);
  CHECK(refused.why(kNbytes, kStart) == "second");
  refused.forget();
  CHECK(refused.why(kNbytes, kStart).empty());
}

TEST(one_record_is_tried_after_each_pause_and_pauses_double_to_a_minute) {
  RefusedSize refused;
  refused.ended(kNbytes, "why", true, kStart);
  auto now = kStart;
  for (const auto pause : {1s, 2s, 4s, 8s, 16s, 32s, 64s, 64s}) {
    refused.ended(kNbytes, "of another connection", true, now);  // it ended together with the first
    CHECK(!refused.why(kNbytes, now + pause - 1ms).empty());
    now += pause;
    CHECK(refused.why(kNbytes, now).empty());   // the trial
    CHECK(!refused.why(kNbytes, now).empty());  // the others wait for it
    refused.ended(kNbytes, "why", true, now);
  }
  refused.moved(kNbytes - 1);
  CHECK(!refused.why(kNbytes, now).empty());
  refused.moved(kNbytes);
  CHECK(refused.why(kNbytes, now).empty());
}

}  // namespace
}  // namespace kvpool
