// Memory for copies of values: bounded, divided between those that hold it, and kept for the next ones. Not thread-safe.
//
// A holder has room while what it holds is at most kShare times what is free. So one alone takes three quarters, two
// take three sevenths each, and however long some hold theirs there is always a part for one more. Who holds nothing
// may also take one piece beyond the bound, one at a time in all: no value is too large, and nobody waits for ever.
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <utility>

#include "store/aligned_bytes.h"
#include "store/io_executor.h"

namespace kvpool {

class CopyMemory {
 public:
  // Of bytes; it outlives its pieces.
  struct Holder {
    std::size_t nbytes = 0;
  };
  struct Piece {
    AlignedBytes bytes;  // of a record, which may be a file's
    std::size_t capacity = 0;
    Holder* holder = nullptr;
    bool is_beyond = false;
  };

  explicit CopyMemory(std::size_t most_nbytes) : most_nbytes_(most_nbytes) {}

  bool has_room(const Holder& holder, std::size_t nbytes) const {
    return is_within(holder, nbytes) || (holder.nbytes == 0 && !is_beyond_);
  }

  // At least `nbytes`, and at most twice as many.
  Piece get(Holder& holder, std::size_t nbytes) {
    const bool is_beyond = !is_within(holder, nbytes);
    const auto kept = std::ranges::find_if(
        kept_, [&](const Piece& one) { return one.capacity >= nbytes && one.capacity <= 2 * nbytes; });
    Piece piece;
    if (kept != kept_.end() && !is_beyond) {
      piece = std::move(*kept);
      kept_.erase(kept);
      kept_nbytes_ -= piece.capacity;
    } else {
      piece = {make_aligned_bytes(nbytes), nbytes, nullptr, is_beyond};
      while (!kept_.empty() && used_ + nbytes + kept_nbytes_ > most_nbytes_) drop_oldest();
    }
    piece.holder = &holder;
    holder.nbytes += piece.capacity;
    is_beyond ? is_beyond_ = true : used_ += piece.capacity;
    return piece;
  }

  void give_back(Piece piece) {
    if (piece.holder == nullptr) return;
    piece.holder->nbytes -= piece.capacity;
    used_at_ = Clock::now();
    if (piece.is_beyond) {
      is_beyond_ = false;
      return;
    }
    used_ -= piece.capacity;
    if (kept_.size() == kKept) drop_oldest();
    kept_nbytes_ += piece.capacity;
    piece.holder = nullptr;
    kept_.push_back(std::move(piece));
  }

  // Frees what was kept for nobody. When to call it again.
  Clock::time_point trim(Clock::time_point now) {
    if (kept_.empty()) return Clock::time_point::max();
    if (now < used_at_ + kKeptFor) return used_at_ + kKeptFor;
    kept_.clear();
    kept_nbytes_ = 0;
    return Clock::time_point::max();
  }

 private:
  static constexpr std::size_t kShare = 3;
  static constexpr std::size_t kKept = 256;
  // Fresh memory costs a fault a page, about as much as copying into it.
  static constexpr Clock::duration kKeptFor = std::chrono::seconds(10);

  bool is_within(const Holder& holder, std::size_t nbytes) const {
    return used_ + nbytes <= most_nbytes_ && holder.nbytes + nbytes <= kShare * (most_nbytes_ - used_);
  }
  void drop_oldest() {
    kept_nbytes_ -= kept_.front().capacity;
    kept_.pop_front();
  }

  const std::size_t most_nbytes_;
  std::size_t used_ = 0;    // without the piece beyond
  bool is_beyond_ = false;  // that piece is out
  std::deque<Piece> kept_;
  std::size_t kept_nbytes_ = 0;
  Clock::time_point used_at_{};
};

}  // namespace kvpool
