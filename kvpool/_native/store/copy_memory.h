// Memory for copies of values, bounded, some of it kept for the next ones. Not thread-safe.
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <memory>
#include <utility>

namespace kvpool {

class CopyMemory {
 public:
  struct Piece {
    std::unique_ptr<std::byte[]> bytes;
    std::size_t capacity = 0;
  };

  explicit CopyMemory(std::size_t most_nbytes) : most_nbytes_(most_nbytes) {}

  // A value larger than all of it has room alone.
  bool has_room(std::size_t nbytes) const { return used_ == 0 || used_ + nbytes <= most_nbytes_; }
  bool is_used() const { return used_ != 0; }

  // At least `nbytes`, and at most twice as many.
  Piece get(std::size_t nbytes) {
    const auto kept = std::find_if(kept_.begin(), kept_.end(), [nbytes](const Piece& one) {
      return one.capacity >= nbytes && one.capacity <= 2 * nbytes;
    });
    Piece piece;
    if (kept != kept_.end()) {
      piece = std::move(*kept);
      kept_.erase(kept);
    } else {
      piece = {std::make_unique_for_overwrite<std::byte[]>(nbytes), nbytes};
    }
    used_ += piece.capacity;
    return piece;
  }

  void give_back(Piece piece) {
    used_ -= piece.capacity;
    if (piece.capacity == 0 || piece.capacity > most_nbytes_ / kKept) return;
    if (kept_.size() == kKept) kept_.pop_front();
    kept_.push_back(std::move(piece));
  }

 private:
  static constexpr std::size_t kKept = 16;

  const std::size_t most_nbytes_;
  std::size_t used_ = 0;
  std::deque<Piece> kept_;
};

}  // namespace kvpool
