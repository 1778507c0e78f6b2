// The thread of a near and a far pool: its turns. See near_far.h.
#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "store/near_far/ahead.h"
#include "store/near_far/behind.h"
#include "store/near_far/copy_memory.h"
#include "store/near_far/items.h"
#include "store/near_far/near_far.h"
#include "store/near_far/shards.h"
#include "store/near_far/tasks.h"

namespace kvpool {
namespace {

constexpr std::size_t kCopiesNbytes = std::size_t{64} << 20;

constexpr std::array<const char*, NearFarBackend::kCountCount> kNames = {
    "near_hits",      "far_hits",     "filled",      "prefetched",    "not_filled",  "behind",
    "behind_present", "lost",         "no_room_far", "refused_far",   "near_faults", "far_faults",
    "uses_told",      "uses_missing", "uses_lost",   "behind_waiting"};

// All that the thread owns. After an exception it begins anew: what was under way ends as a fault.
class Life {
 public:
  Life(NearFarBackend& backend, const std::shared_ptr<Ended>& ended)
      : ended_(*ended),
        shards_(backend.far()),
        tasks_(memory_, ended),
        ahead_(backend, tasks_, memory_, shards_),
        behind_(backend, tasks_, memory_, shards_),
        items_(backend, tasks_, ahead_, behind_) {}
  Life(const Life&) = delete;
  Life& operator=(const Life&) = delete;
  // Blocks until no batch uses memory of copies.
  ~Life() {
    ahead_.end_all();
    tasks_.end_all();
  }

  // Looks at all that can be done, and only then sleeps. What ended comes first: it makes room near and in memory.
  // Whatever happens after a look ends the sleep: a batch, an item, a stop, a time.
  void turn(Source& source) {
    for (Task* task = ended_.take(); task != nullptr;) {
      Task& ended = *std::exchange(task, task->next_ended);
      go_on(ended);
    }
    items_.take(source);
    const Clock::time_point now = Clock::now();
    const Clock::time_point sends = behind_.step(now);
    ahead_.step();
    ended_.wait_until(std::min({sends, items_.look(now), memory_.trim(now)}));
  }

 private:
  void go_on(Task& task) {
    const std::shared_ptr<Batch> batch = std::move(task.batch);
    switch (task.step) {
      case Task::Step::kNear:
      case Task::Step::kFar:
        return items_.go_on(task, *batch);
      case Task::Step::kReadAhead:
      case Task::Step::kFill:
        return ahead_.go_on(task, *batch);
      default:
        return behind_.go_on(task, *batch);
    }
  }

  Ended& ended_;
  CopyMemory memory_{kCopiesNbytes};
  Shards shards_;
  Tasks tasks_;
  Ahead ahead_;
  Behind behind_;
  Items items_;
};

class NearFarThread : public IoThread {
 public:
  explicit NearFarThread(NearFarBackend& backend) : backend_(backend) {}

  void wake() noexcept override { ended_->wake(); }

  void run(Source& source) override {
    Life life(backend_, ended_);
    while (!source.closing()) life.turn(source);
  }

 private:
  NearFarBackend& backend_;
  const std::shared_ptr<Ended> ended_ = std::make_shared<Ended>();
};

}  // namespace

std::unique_ptr<IoThread> NearFarBackend::make_io_thread(unsigned) {
  return std::make_unique<NearFarThread>(*this);
}

void NearFarBackend::append_counters(Counters& counters) const {
  for (std::size_t i = 0; i < kCountCount; ++i) {
    counters.emplace_back(kNames[i], counts_[i].load(std::memory_order_relaxed));
  }
}

}  // namespace kvpool
