// Copies near: of what lookups wait for before a load, and of what a get found far. One thread.
#pragma once

#include <cstddef>
#include <string>
#include <unordered_map>

#include "store/near_far/near_far.h"
#include "store/near_far/shards.h"
#include "store/near_far/tasks.h"

namespace kvpool {

// Keys that lookups wait for.
inline constexpr std::size_t kMaxAhead = 65'536;

class Ahead {
 public:
  Ahead(NearFarBackend& backend, Tasks& tasks, CopyMemory& memory, Shards& shards)
      : backend_(backend), tasks_(tasks), memory_(memory), shards_(shards) {}

  // Copies its value near, unless memory is short.
  void fill(const Item& got, const Found& found);
  // The item of a lookup ends when its value was copied near.
  void wish(Item item);
  // The key is deleted everywhere.
  void forget(const std::string& key);
  // Ends those that nobody waits for any more.
  void look();

  // A task of ours ended.
  void go_on(Task& task, const Batch& batch);
  // Sends what may be sent.
  void step();
  // Cancels all that waits.
  void end_all();
  bool is_busy() const { return waiting_ != 0; }

 private:
  using Step = Task::Step;
  using Count = NearFarBackend::Count;
  // Of a key that lookups wait for: where it waits, or its task.
  struct Place {
    Shard* shard = nullptr;
    std::list<Wish>::iterator wish{};
    Task* task = nullptr;
  };

  void begin(Shard& shard);
  void send(Task& task, Step step);
  void read_ended(Task& task, const Batch& batch);
  void fill_ended(Task& task, const Batch& batch);
  void end(Task& task);
  static bool was_joined_late(const Task& task, Status status);

  NearFarBackend& backend_;
  Tasks& tasks_;
  CopyMemory& memory_;
  Shards& shards_;
  CopyMemory::Holder fills_;
  std::unordered_map<std::string, Place> wanted_;
  std::size_t waiting_ = 0;
};

}  // namespace kvpool
