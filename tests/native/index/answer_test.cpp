#include "index/answer.h"

#include <array>
#include <chrono>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "check.h"

namespace kvpool {
namespace {

EventBatch batch(Event::Kind kind, std::uint64_t hash) {
  EventBatch made;
  made.hashes = {hash};
  Event event;
  event.kind = kind;
  event.count = 1;
  made.events.push_back(event);
  return made;
}

Rows::Row row(std::string worker, std::string holder, std::string pool, const RankState& state) {
  return {std::move(worker), 0, "http://" + holder, 16, std::move(holder), std::move(pool), "", &state};
}

std::span<const std::byte> bytes(const std::uint64_t& hash) { return std::as_bytes(std::span(&hash, 1)); }

}  // namespace

TEST(an_answer_has_a_row_for_every_rank_and_credits_no_stale_one) {
  Table table(100, false);
  table.apply("rank/0", 0, batch(Event::Kind::kStored, 7));
  table.apply("rank/1", 0, batch(Event::Kind::kStored, 7));
  std::array<RankState, 3> states;
  states[0].stale = states[2].stale = false;
  states[0].sequence = 300;
  states[0].heard_at_ms = 40;
  states[2].version = 1;
  const Rows rows({row("a", "rank/0", "pool/x", states[0]), row("b", "rank/1", "", states[1]),
                   row("c", "rank/2", "pool/x", states[2])},
                  true);
  const std::uint64_t hash = 7;
  Answer answer = rows.answer(table, bytes(hash), 50);
  CHECK(answer.device == (std::vector<std::uint32_t>{1, 0, 0}));
  CHECK(answer.sequences == (std::vector<std::uint64_t>{300, 0, 0}));
  CHECK(answer.staleness_ms == (std::vector<std::uint32_t>{10, 50, 50}));
  CHECK(answer.moved == std::vector<std::size_t>{2});
  table.apply("rank/2", 0, batch(Event::Kind::kStored, 7));
  rows.again(2, table, bytes(hash), 50, answer);
  CHECK(answer.device == (std::vector<std::uint32_t>{1, 0, 1}));
  const std::string packed = rows.pack(answer);
  CHECK(
      packed.starts_with(std::string_view("\x0a\x01"
                                          "a\x0a\x01"
                                          "b\x0a\x01"
                                          "c\x12\x03\0\0\0",
                                          14)));
  CHECK(packed.ends_with(std::string_view("\x52\x03\x0a\x32\x32\x5a\x03\0\x01\0\x62\x03\x01\0\x01", 15)));
  CHECK(Rows({}, true).pack(Rows({}, true).answer(table, bytes(hash), 50)).empty());
}

// A rank holds its one block after every odd batch.
TEST(a_row_that_did_not_move_is_true_as_of_its_sequence) {
  Table table(100, false);
  RankState state;
  state.stale = false;
  const Rows rows({row("a", "rank/0", "", state)}, true);
  std::jthread writer([&](const std::stop_token& stopped) {
    for (std::uint64_t sequence = 1; !stopped.stop_requested(); ++sequence) {
      ++state.version;
      table.apply("rank/0", 0, batch(sequence % 2 == 1 ? Event::Kind::kStored : Event::Kind::kRemoved, 7));
      state.sequence = sequence;
      ++state.version;
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  });
  const std::uint64_t hash = 7;
  std::size_t unmoved = 0;
  CHECK(test::eventually([&] {
    const Answer answer = rows.answer(table, bytes(hash), 0);
    if (!answer.moved.empty()) return false;
    CHECK(answer.device[0] == answer.sequences[0] % 2);
    return ++unmoved == 50;
  }));
}

}  // namespace kvpool
