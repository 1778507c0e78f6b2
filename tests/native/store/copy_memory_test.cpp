// Memory of copies: who holds much leaves a part to the others, and no value is too large.
#include "store/near_far/copy_memory.h"

#include <utility>
#include <vector>

#include "check.h"

namespace kvpool {

// In pieces of one byte; what a holder gets until it has no room.
static std::size_t fill(CopyMemory& memory, CopyMemory::Holder& holder,
                        std::vector<CopyMemory::Piece>& pieces) {
  const std::size_t before = holder.nbytes;
  while (holder.nbytes < 1000 && memory.has_room(holder, 1)) pieces.push_back(memory.get(holder, 1));
  return holder.nbytes - before;
}

TEST(copy_memory_is_shared_by_those_that_hold_it) {
  CopyMemory memory(1000);
  CopyMemory::Holder first, second, third;
  std::vector<CopyMemory::Piece> pieces;
  const std::size_t of_first = fill(memory, first, pieces);
  CHECK(of_first >= 740 && of_first <= 760);
  CHECK(fill(memory, second, pieces) >= 180);
  CHECK(fill(memory, third, pieces) >= 40);
  CHECK(first.nbytes + second.nbytes + third.nbytes < 1000);
  for (auto& piece : pieces) memory.give_back(std::move(piece));
  CHECK(first.nbytes + second.nbytes + third.nbytes == 0);
  CHECK(fill(memory, second, pieces) == of_first);
}

TEST(copy_memory_takes_one_piece_beyond_its_bound_at_a_time) {
  CopyMemory memory(1000);
  CopyMemory::Holder first, second;
  CHECK(memory.has_room(first, 5000));
  CopyMemory::Piece large = memory.get(first, 5000);
  CHECK(!memory.has_room(second, 5000));
  CHECK(memory.has_room(second, 100));
  memory.give_back(std::move(large));
  CHECK(memory.has_room(second, 5000));
}

}  // namespace kvpool
