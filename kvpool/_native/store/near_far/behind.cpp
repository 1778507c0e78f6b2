// Queues, copies, and tells. See behind.h.
#include "store/near_far/behind.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace kvpool {
namespace {

using namespace std::chrono_literals;

constexpr Clock::duration kLongestCopy = 10min;
constexpr Clock::duration kAskTimeout = 10s;
// Of one copy, by faults that may be its own. A shard that says itself that it takes nothing counts for none.
constexpr unsigned kMostFailures = 8;
constexpr std::size_t kMostMoved = 1024;  // keys to another shard, in one step
// A copy of its bytes delays a put.
constexpr std::size_t kMostCopiedNbytes = std::size_t{8} << 20;

// Uses to be told.
constexpr std::size_t kMostUses = 65'536;
constexpr std::size_t kLeastUses = 256;  // of a shard, however many there are
constexpr std::size_t kTogether = 256;   // in a batch
constexpr Clock::duration kGather = 1s;  // for a batch
// A quarter of a time to live is left to a lost one. A far pool that evicts forgets sooner, and does not say when: the
// span begins short, doubles while far keeps what it had, and halves when it does not.
constexpr int kSpansInTtl = 4;
constexpr Clock::duration kShortestSpan = 15s;
constexpr Clock::duration kLongestSpan = 10min;
constexpr Clock::duration kRefusedSpan = 10min;  // until a use sends a refused value again

}  // namespace

// ---------------------------------------------------------------------- queues

void Behind::put(const Item& item, const Found& found) {
  const std::size_t nbytes = item.buffer().size();
  Copy copy{item.key(), nbytes, item.op() == Op::kPut, false, 0, found.seal};
  Shard& shard = shards_.of(copy.key.text);
  told_.set(copy.key.text, Clock::now() + span_of(shard, Clock::now()), false);
  if (!shard.waiting.empty() || nbytes > kMostCopiedNbytes || !shard.may_copy(nbytes, memory_)) {
    return enqueue(shard, std::move(copy));
  }
  Task& task = begin(shard, std::move(copy), Step::kWriteBehind);
  std::memcpy(task.memory.bytes.get(), item.buffer().data(), nbytes);
  send(task, Step::kWriteBehind);
}

void Behind::enqueue(Copy copy) {
  Shard& shard = shards_.of(copy.key.text);
  enqueue(shard, std::move(copy));
}

void Behind::enqueue(Shard& shard, Copy copy) {
  if (const auto known = index_.find(copy.key.text); known != index_.end()) {
    Copy& waits = *known->second.second;
    waits.replaces = waits.replaces || copy.replaces;
    waits.nbytes = copy.nbytes;
    waits.lets_go = false;
    return;
  }
  copy.seal.reset();  // what is near then is read
  shard.waiting.push_back(std::move(copy));
  const auto place = std::prev(shard.waiting.end());
  index_.emplace(place->key.text, Place(&shard, place));
  if (++waiting_ > kMaxBehind) drop_oldest();
  tell_waiting();
}

Copy Behind::take(Place place) {
  index_.erase(place.second->key.text);
  Copy copy = std::move(*place.second);
  place.first->waiting.erase(place.second);
  --waiting_;
  return copy;
}

void Behind::drop_oldest() {
  Shard* fullest = nullptr;
  shards_.for_each([&](Shard& shard) {
    if (fullest == nullptr || shard.waiting.size() > fullest->waiting.size()) fullest = &shard;
  });
  take({fullest, fullest->waiting.begin()});
  backend_.add(Count::kLost);
}

bool Behind::look_at_homes(Shard& shard) {
  for (std::size_t moved = 0; !shard.waiting.empty(); ++moved) {
    if (shards_.holds(shard, shard.waiting.front().key.text)) return true;
    if (moved == kMostMoved) return false;
    enqueue(take({&shard, shard.waiting.begin()}));
  }
  return true;
}

void Behind::tell_waiting() { backend_.set_waiting(waiting_ + copying_); }

void Behind::forget(const std::string& key) {
  if (const auto found = index_.find(key); found != index_.end()) take(found->second);
  uses_ -= shards_.of(key).uses.erase(key);
  told_.forget(key);
  reused_.forget(key);
  tell_waiting();
}

void Behind::let_go(const std::string& key) {
  if (const auto found = index_.find(key); found != index_.end()) found->second.second->lets_go = true;
  uses_ -= shards_.of(key).uses.erase(key);
  told_.forget(key);
}

// ---------------------------------------------------------------------- what may be sent

Clock::time_point Behind::step(Clock::time_point now) {
  Clock::time_point next = Clock::time_point::max();
  shards_.for_each([&](Shard& shard) {
    if (shard.waiting.empty() && shard.uses.empty()) return;
    if (shard.state == Shard::State::kPaused && now >= shard.paused_until) ask(shard, now);
    if (shard.state == Shard::State::kPaused) next = std::min(next, shard.paused_until);
    if (shard.state != Shard::State::kSending || shard.uses.empty() || shard.is_told) return;
    if (shard.uses.size() >= kTogether || now >= shard.tell_at) {
      tell(shard, now);
    } else {
      next = std::min(next, shard.tell_at);
    }
  });
  send_copies();
  shards_.remove_idle();
  tell_waiting();
  return next;
}

// One of each shard in turn.
void Behind::send_copies() {
  for (bool sent = waiting_ != 0; sent;) {
    sent = false;
    shards_.for_each([&](Shard& shard) {
      if (shard.waiting.empty() || !shard.may_copy(shard.waiting.front().nbytes, memory_)) return;
      sent = true;
      if (shards_.holds(shard, shard.waiting.front().key.text)) return read(shard);
      enqueue(take({&shard, shard.waiting.begin()}));
    });
  }
}

void Behind::read(Shard& shard) {
  Copy copy = take({&shard, shard.waiting.begin()});
  send(begin(shard, std::move(copy), Step::kReadBehind), Step::kReadBehind);
}

Task& Behind::begin(Shard& shard, Copy copy, Step step) {
  Task task;
  task.step = step;
  task.shard = &shard;
  task.memory = memory_.get(shard.behind, copy.nbytes);
  task.copy = std::move(copy);
  ++shard.copying;
  ++copying_;
  tell_waiting();
  return tasks_.add(std::move(task));
}

void Behind::send(Task& task, Step step) {
  const Copy& copy = *task.copy;
  const bool reads = step == Step::kReadBehind;
  task.step = step;
  task.op = reads ? Op::kGet : copy.replaces ? Op::kPut : Op::kPutAbsent;
  IoExecutor& executor = reads ? backend_.near() : backend_.far();
  const std::string refusal =
      tasks_.send(task, executor, {copy.key}, {{task.memory.bytes.get(), copy.nbytes}}, kCopyTimeout,
                  kLongestCopy, {reads ? Found{} : Found{copy.nbytes, copy.seal}});
  if (refusal.empty()) return;
  backend_.add(Count::kLost);
  end(task);
}

void Behind::end(Task& task) {
  --task.shard->copying;
  --copying_;
  tasks_.drop(task);
}

// ---------------------------------------------------------------------- what ended

void Behind::go_on(Task& task, const Batch& batch) {
  switch (task.step) {
    case Step::kReadBehind:
      return read_ended(task, batch);
    case Step::kWriteBehind:
      return write_ended(task, batch);
    case Step::kAsk:
      return ask_ended(task, batch);
    case Step::kTell:
      return tell_ended(task, batch);
    default:
      return tasks_.drop(task);
  }
}

void Behind::read_ended(Task& task, const Batch& batch) {
  if (batch.results()[0] == Status::kOk && !task.deleted) {
    task.copy->seal = batch.found(0).seal;
    return send(task, Step::kWriteBehind);
  }
  if (!task.deleted) backend_.add(Count::kLost);
  end(task);
}

void Behind::write_ended(Task& task, const Batch& batch) {
  const Clock::time_point now = Clock::now();
  const Status status = batch.results()[0];
  Shard& shard = *task.shard;
  Copy copy = std::move(*task.copy);
  const bool deleted = task.deleted;
  end(task);
  if (is_broken(status)) {
    if (deleted) return;
    backend_.add(Count::kFarFaults);
    shard.failed(now);
    if (batch.blame() == Blame::kUnknown && ++copy.failures >= kMostFailures)
      return backend_.add(Count::kLost);
    return enqueue(std::move(copy));
  }
  shard.took();
  if (is_found(status)) {
    if (!deleted) backend_.add(status == Status::kOk ? Count::kBehind : Count::kPresent);
    if (!deleted) is_far(shard, copy.key);
  } else {
    backend_.add(status == Status::kNoRoom ? Count::kNoRoomFar : Count::kRefused);
    is_refused(copy.key);
  }
  if (!deleted && !copy.lets_go) return;
  Task after;
  after.step = Step::kAfterCopy;
  after.op = deleted ? Op::kDelete : Op::kExpire;
  Task& sent = tasks_.add(std::move(after));
  if (!tasks_.send(sent, backend_.far(), {copy.key}, {}, kCopyTimeout, kCopyTimeout).empty())
    tasks_.drop(sent);
}

void Behind::is_far(Shard& shard, const Key& key) {
  const Clock::time_point now = Clock::now();
  told_.set(key.text, now + span_of(shard, now), true);
}

void Behind::is_refused(const Key& key) { told_.set(key.text, Clock::now() + kRefusedSpan, false); }

// ---------------------------------------------------------------------- a shard after its pause

// Moves no bytes: neither memory nor a value waits for a shard that may be silent.
void Behind::ask(Shard& shard, Clock::time_point now) {
  if (!look_at_homes(shard)) {
    shard.paused_until = now;  // the rest of them in the next step
    return;
  }
  if (shard.waiting.empty() && shard.uses.empty()) return;
  const Key& key = shard.waiting.empty() ? shard.uses.begin()->second.key : shard.waiting.front().key;
  Task task;
  task.step = Step::kAsk;
  task.op = Op::kTouch;
  task.shard = &shard;
  task.uses.push_back({key, 0, false, false});
  Task& added = tasks_.add(std::move(task));
  if (!tasks_.send(added, backend_.far(), {key}, {}, kAskTimeout, kAskTimeout).empty()) {
    shard.paused_until = now + kAskTimeout;
    return tasks_.drop(added);
  }
  ++shard.asking;
  shard.state = Shard::State::kAsked;
}

void Behind::ask_ended(Task& task, const Batch& batch) {
  Shard& shard = *task.shard;
  --shard.asking;
  if (is_broken(batch.results()[0])) {
    shard.failed(Clock::now());
  } else {
    shard.answered();
  }
  tasks_.drop(task);
}

// ---------------------------------------------------------------------- uses

Clock::duration Behind::longest_span() const {
  const Clock::duration ttl = backend_.far_ttl();
  return ttl == Clock::duration::zero() ? kLongestSpan : std::min(ttl / kSpansInTtl, kLongestSpan);
}

Clock::duration& Behind::span_of(Shard& shard, Clock::time_point now) {
  if (shard.span == Clock::duration::zero()) shard.span = std::min(longest_span(), kShortestSpan);
  if (shard.lengthens_at == Clock::time_point{}) shard.lengthens_at = now + shard.span;
  return shard.span;
}

void Behind::used(const Key& key, std::size_t nbytes, bool is_reuse) {
  const Clock::time_point now = Clock::now();
  if (!backend_.all() && is_reuse && reused_.due(key.text, now) != Uses::Due::kNot) {
    reused_.set(key.text, now + std::chrono::hours(24 * 20), false);
    told_.set(key.text, now + span_of(shards_.of(key.text), now), false);
    return enqueue({key, nbytes});
  }
  const Uses::Due due = told_.due(key.text, now);
  if (due == Uses::Due::kNot || index_.contains(key.text)) return;
  Shard& shard = shards_.of(key.text);
  if (uses_ >= kMostUses || shard.uses.size() >= std::max(kLeastUses, kMostUses / shards_.size())) {
    return backend_.add(Count::kUsesLost);
  }
  const Clock::duration span = span_of(shard, now);
  told_.set(key.text, now + span, due == Uses::Due::kAgain);
  if (shard.uses.empty()) shard.tell_at = now + std::min(kGather, span / 8);
  uses_ += shard.uses.try_emplace(key.text, Use{key, nbytes, due == Uses::Due::kAgain, is_reuse}).second;
}

void Behind::used_far(const Key& key) { is_far(shards_.of(key.text), key); }

void Behind::tell(Shard& shard, Clock::time_point now) {
  Task task;
  task.step = Step::kTell;
  task.op = Op::kTouch;
  task.shard = &shard;
  std::vector<Key> keys;
  while (!shard.uses.empty() && keys.size() < kTogether) {
    auto use = shard.uses.extract(shard.uses.begin());
    keys.push_back(use.mapped().key);
    task.uses.push_back(std::move(use.mapped()));
    --uses_;
  }
  shard.tell_at = now + kGather;
  Task& added = tasks_.add(std::move(task));
  if (tasks_.send(added, backend_.far(), std::move(keys), {}, kAskTimeout, kAskTimeout).empty()) {
    shard.is_told = true;
    return;
  }
  for (const Use& use : added.uses) lose(use);
  tasks_.drop(added);
}

// Its next use is told.
void Behind::lose(const Use& use) {
  backend_.add(Count::kUsesLost);
  told_.set(use.key.text, Clock::now(), use.was_far);
}

void Behind::tell_ended(Task& task, const Batch& batch) {
  const Clock::time_point now = Clock::now();
  Shard& shard = *task.shard;
  shard.is_told = false;
  bool answered = false;
  bool forgets = false;
  std::vector<Copy> lacking;
  for (std::size_t i = 0; i < task.uses.size(); ++i) {
    Use& use = task.uses[i];
    const Status status = batch.results()[i];
    answered = answered || !is_broken(status);
    if (is_fault(status)) {
      lose(use);
      continue;
    }
    backend_.add(is_found(status) ? Count::kUsesTold : Count::kUsesMissing);
    if (told_.due(use.key.text, now) != Uses::Due::kNot) continue;  // it was deleted, or let go, meanwhile
    if (is_found(status)) {
      is_far(shard, use.key);
      continue;
    }
    forgets = forgets || use.was_far;
    if (use.nbytes != 0 && (backend_.all() || use.is_reuse || use.was_far)) {
      lacking.push_back({std::move(use.key), use.nbytes});
    }
  }
  tasks_.drop(task);
  if (!answered) return shard.failed(now);
  if (forgets) {
    shard.span = std::max(shard.span / 2, std::min(longest_span(), kShortestSpan));
    shard.lengthens_at = now + shard.span;
  } else if (now >= shard.lengthens_at) {
    shard.span = std::min(2 * shard.span, longest_span());
    shard.lengthens_at = now + shard.span;
  }
  for (Copy& copy : lacking) enqueue(std::move(copy));
}

}  // namespace kvpool
