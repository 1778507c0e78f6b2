// What is under way in one batch of the near or the far pool: callers' items, or a copy or a question of our own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "store/io_executor.h"
#include "store/near_far/copy_memory.h"

namespace kvpool {

struct Shard;

inline constexpr Clock::duration kCopyTimeout = std::chrono::seconds(30);  // without a byte that moves

// A value to be copied.
struct Copy {
  Key key;
  std::size_t nbytes = 0;
  bool replaces = false;
  bool lets_go = false;  // its use ended while it waited: far lets it go as well
  unsigned failures = 0;
  std::optional<Seal> seal = {};  // once it was read, or put
};

// A key that was used near. `nbytes`: of its value; 0: unknown. `was_far`: far had it before. `is_reuse`: its value was
// asked for, not only its presence.
struct Use {
  Key key;
  std::size_t nbytes = 0;
  bool was_far = false;
  bool is_reuse = false;
};

struct Task {
  enum class Step : std::uint8_t {
    kNear,         // items
    kFar,          // items
    kReadAhead,    // a copy from far, which items of lookups wait for
    kFill,         // its write near, or one of what a get found far
    kReadBehind,   // a copy from near
    kWriteBehind,  // its write far
    kAsk,          // after a pause of a shard
    kTell,         // uses
    kAfterCopy,    // the deletion or expiry of what was copied meanwhile
  };

  Step step = Step::kNear;
  Op op = Op::kGet;
  std::vector<Item> items;    // of one caller's batch, or those that wait for a copy
  std::vector<Status> found;  // by item: what near said to a delete or an expiry
  std::optional<Copy> copy;
  std::vector<Use> uses;  // of kTell; of kAsk the one key
  Shard* shard = nullptr;
  CopyMemory::Piece memory;          // of a copy
  bool deleted = false;              // one of its keys, meanwhile: nothing of it is copied, or stays
  std::vector<std::string> deletes;  // the keys of a delete
  std::shared_ptr<Batch> batch;
  Task* next_ended = nullptr;
  std::list<Task>::iterator self{};
};

inline bool is_found(Status status) { return status == Status::kOk || status == Status::kPresent; }
// A fault that is not the key's own: others may meet it, too.
inline bool is_broken(Status status) {
  return status == Status::kFault || status == Status::kTimedOut || status == Status::kCancelled;
}
inline bool is_fault(Status status) { return is_broken(status) || status == Status::kRefused; }

}  // namespace kvpool
