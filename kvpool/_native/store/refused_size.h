// Records that a server does not move: its limits (proto-max-bulk-len, client-query-buffer-limit, output buffers)
// end the connection in their middle, and a new one would end the same way.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

#include "store/io_executor.h"

namespace kvpool {

// Of one server and direction, shared by all its connections. Any thread; nothing blocks.
class RefusedSize {
 public:
  // Why a record of `nbytes` is not worth a connection now; empty: move it. After each pause one is tried.
  std::string why(std::size_t nbytes, Clock::time_point now);
  // The server ended a connection, with `words` for callers, while a record of `nbytes` was under way. `said`: in
  // its own words about the protocol; else the second such end counts, and only of records that a limit can concern.
  void ended(std::size_t nbytes, std::string words, bool said, Clock::time_point now);
  void moved(std::size_t nbytes);
  // The server is away: nothing that ended concerned a record.
  void forget();

 private:
  std::atomic<std::size_t> nbytes_{
      SIZE_MAX};      // the smallest that ended a connection; written under the mutex
  std::mutex mutex_;  // guards the following fields
  std::string words_;
  unsigned times_ = 0;  // 1: suspected, and moved
  bool is_tried_ = false;
  Clock::time_point until_{};
};

}  // namespace kvpool
