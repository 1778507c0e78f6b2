// When the next use of a key is due, however long it was not used.
#include "store/near_far/uses.h"

#include <chrono>
#include <string>

#include "check.h"

namespace kvpool {
namespace {

using namespace std::chrono_literals;
using Due = Uses::Due;

TEST(uses_a_key_is_due_once_its_time_has_come_and_then_for_years) {
  const Clock::time_point now = Clock::now();
  for (const bool was_far : {false, true}) {
    Uses uses;
    uses.set("a key", now + 15s, was_far);
    CHECK(uses.due("a key", now) == Due::kNot);
    CHECK(uses.due("a key", now + 14s) == Due::kNot);
    for (const auto later : {16s, 86'400s * 24, 86'400s * 26, 86'400s * 40, 86'400s * 51, 86'400s * 800}) {
      CHECK(uses.due("a key", now + later) == (was_far ? Due::kAgain : Due::kFirst));
    }
  }
  Uses uses;
  uses.set("a key", now + 1s, false);
  CHECK(uses.due("a key", now + 900ms) == Due::kNot);  // of a far pool with a short time to live
  CHECK(uses.due("a key", now + 1100ms) != Due::kNot);
}

}  // namespace
}  // namespace kvpool
