// Copies of what is near to the far pool, and what is told far of uses near. One thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <list>
#include <string>
#include <string_view>
#include <unordered_map>

#include "store/near_far/near_far.h"
#include "store/near_far/shards.h"
#include "store/near_far/tasks.h"
#include "store/near_far/uses.h"

namespace kvpool {

class Behind {
 public:
  Behind(NearFarBackend& backend, Tasks& tasks, CopyMemory& memory, Shards& shards)
      : backend_(backend), tasks_(tasks), memory_(memory), shards_(shards) {}

  // A value was put near: copies its bytes while far takes them, else queues its key.
  void put(const Item& item, const Found& found);
  // A value near was used: far is told when it is due. `nbytes`: of the value; 0: unknown.
  void used(const Key& key, std::size_t nbytes, bool is_reuse);
  // Far has counted a use.
  void used_far(const Key& key);
  // The key is deleted everywhere: nothing of it is to come.
  void forget(const std::string& key);
  // The key's value may go everywhere.
  void let_go(const std::string& key);

  // A task of ours ended.
  void go_on(Task& task, const Batch& batch);
  // Sends what may be sent; when to call it again, unless a task of ours ends before.
  Clock::time_point step(Clock::time_point now);
  bool is_busy() const { return waiting_ != 0 || copying_ != 0; }

 private:
  using Step = Task::Step;
  using Count = NearFarBackend::Count;
  using Place = std::pair<Shard*, std::list<Copy>::iterator>;

  void enqueue(Copy copy);
  void enqueue(Shard& shard, Copy copy);
  Copy take(Place place);
  void drop_oldest();
  // Moves keys at the front that belong to another shard now. False: there are more of them.
  bool look_at_homes(Shard& shard);
  void tell_waiting();

  void send_copies();
  void read(Shard& shard);
  void send(Task& task, Step step);
  Task& begin(Shard& shard, Copy copy, Step step);
  void end(Task& task);
  void ask(Shard& shard, Clock::time_point now);
  void tell(Shard& shard, Clock::time_point now);

  void read_ended(Task& task, const Batch& batch);
  void write_ended(Task& task, const Batch& batch);
  void ask_ended(Task& task, const Batch& batch);
  void tell_ended(Task& task, const Batch& batch);
  void is_far(Shard& shard, const Key& key);
  void is_refused(const Key& key);

  Clock::duration longest_span() const;
  Clock::duration& span_of(Shard& shard, Clock::time_point now);
  void lose(const Use& use);

  NearFarBackend& backend_;
  Tasks& tasks_;
  CopyMemory& memory_;
  Shards& shards_;
  std::unordered_map<std::string_view, Place> index_;  // of what waits, by the text of its key
  std::size_t waiting_ = 0;
  std::size_t copying_ = 0;
  std::size_t uses_ = 0;  // to be told, of all shards
  Uses told_;
  Uses reused_;  // where only what is used twice goes far: what went
};

}  // namespace kvpool
