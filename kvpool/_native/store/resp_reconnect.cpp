// Dial, suspicion and loss of a connection: part of RespConnection, see resp_connection.h.
#include <algorithm>
#include <utility>

#include "store/resp_connection.h"

namespace kvpool {
namespace {

using namespace std::chrono_literals;
using Kind = RespRequest::Kind;

constexpr auto kFirstBackoff = 10ms;
// A pause and an attempt stay below a second in all, so a recovered server is used that soon.
constexpr auto kMaxBackoff = 400ms;
constexpr auto kConnectPatience = 500ms;
// For a first redial; afterwards requests do not wait for it.
constexpr auto kDialGrace = 250ms;

}  // namespace

void RespConnection::keep_up(Clock::time_point now) {
  if (!socket_ && is_wanted_) dial(now);
  if (socket_ && seen_silences_ != node_->silences.load()) check_after_silence(now);
}

void RespConnection::dial(Clock::time_point now) {
  if (!dial_) {
    if (now < next_dial_) return;
    if (!find_addresses()) {
      ++attempts_;
      back_off();
      return;
    }
    seen_silences_ = node_->silences.load();
    dialled_at_ = now;
    dial_.emplace(settings_, addresses_, role_ == Role::kReads ? "reads" : "writes", now, kConnectPatience);
  }
  switch (dial_->step(now)) {
    case Dial::State::kUnderWay:
      if (!failing_ && now >= dialled_at_ + grace()) fail_all();
      return;
    case Dial::State::kReady:
      socket_ = dial_->take();
      password_ = dial_->password();
      dial_.reset();
      round_trip_ = shortest_round_trip(socket_.fd());
      parser_.reset();
      said_.clear();
      readable_ = false;
      failing_ = false;
      stood_ = true;
      touches_ = true;  // its rights may have changed
      joins_ = topology_.map()->nodes.size() == 1;
      renews_ = true;
      is_full_ = false;
      moved_at_ = now;
      count_up(true);
      counts_.connections.fetch_add(1, std::memory_order_relaxed);
      return;
    case Dial::State::kFailed:
      last_error_ = dial_->error();
      dial_.reset();
      node_->puts.forget();
      node_->gets.forget();
      counts_.failed_dials.fetch_add(1, std::memory_order_relaxed);
      ++attempts_;
      back_off();
      return;
  }
}

// The address may have changed. The resolver blocks, so it is asked only about an absent single server; the
// thread that installs the topology resolves a cluster's nodes.
bool RespConnection::find_addresses() {
  try {
    if (!node_->asks_resolver) addresses_ = node_->addresses();
    // While one I/O thread asks, the others keep refusing.
    if (node_->asks_resolver && attempts_ > 1 && !node_->resolving.test_and_set()) {
      const std::unique_ptr<std::atomic_flag, void (*)(std::atomic_flag*)> asking(
          &node_->resolving, [](std::atomic_flag* flag) { flag->clear(); });
      addresses_ = resolve(settings_.endpoint);
    }
  } catch (const Unreachable& error) {
    last_error_ = error.what();
  }
  if (!addresses_.empty()) return true;
  last_error_ = settings_.endpoint.name() + ": the name has no address";
  return false;
}

void RespConnection::back_off() {
  const unsigned doublings = std::min(attempts_ - 1, 10U);
  const auto longest = std::min<Clock::duration>(kFirstBackoff * (1U << doublings), kMaxBackoff);
  const double share = std::uniform_real_distribution<double>(0.5, 1.0)(random_);
  next_dial_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(longest * share);
  fail_all();
}

Clock::duration RespConnection::grace() const { return stood_ ? kDialGrace : kConnectPatience; }

// Until the next answered PING, every item for this server is a fault at once.
void RespConnection::fail_all() {
  failing_ = true;
  topology_.mark_stale();
  if (last_error_.empty()) last_error_ = settings_.endpoint.name() + ": no connection stands yet";
  for (const auto& request : requests_) {
    if (request->item) counts_.refused.fetch_add(1, std::memory_order_relaxed);
    end_item(*request, Status::kFault, last_error_, Blame::kStore);
  }
  std::erase_if(requests_, [](const auto& request) { return request->kind != Kind::kCleanup; });
  for (Item& item : take_waiting()) {
    counts_.refused.fetch_add(1, std::memory_order_relaxed);
    item.finish(item.stopped().value_or(Status::kFault), last_error_, Blame::kStore);
  }
  recount_send_window();
}

// Another connection fell silent, perhaps with the whole server. A pending reply will decide, and no request
// is sent before it. Without one, only another dial's PING decides.
void RespConnection::check_after_silence(Clock::time_point now) {
  count_up(false);
  last_error_ = settings_.endpoint.name() + ": the server does not answer in time";
  if (awaiting()) return;
  hang_up();
  next_dial_ = now;
  fail_all();
  dial(now);
}

void RespConnection::count_up(bool up) {
  if (std::exchange(up_, up) == up) return;
  if (up) {
    node_->up.fetch_add(1);
    counts_.up.fetch_add(1, std::memory_order_relaxed);
  } else {
    node_->up.fetch_sub(1);
    counts_.up.fetch_sub(1, std::memory_order_relaxed);
  }
}

void RespConnection::hang_up() {
  dial_.reset();
  if (!socket_) return;
  socket_.reset();
  count_up(false);
  counts_.disconnections.fetch_add(1, std::memory_order_relaxed);
}

// The server hung up, perhaps on the largest record under way.
void RespConnection::end_by_server(std::string_view why) {
  std::string words = said_.empty() ? std::string(why) : hung_up(said_);
  const Request* largest = nullptr;
  for (const auto& request : requests_) {
    if (!request->on_the_wire() || !request->item || refused(request->kind) == nullptr) continue;
    if (largest == nullptr || request->item->buffer().size() > largest->item->buffer().size()) {
      largest = request.get();
    }
  }
  if (largest != nullptr) {
    const std::size_t nbytes = largest->item->buffer().size();
    words += ", with " + std::to_string(nbytes) + " bytes of a block under way";
    refused(largest->kind)
        ->ended(nbytes, settings_.endpoint.name() + ": " + words, !said_.empty(), Clock::now());
  }
  lose(Cause::kServer, words);
}

// Drops the connection and its sent requests, whose replies are lost; unsent ones wait for the next.
void RespConnection::lose(Cause cause, std::string_view why) {
  hang_up();
  // Before any item ends, so that a retry finds the other connections warned.
  if (cause == Cause::kSilence) node_->silences.fetch_add(1);
  last_error_ = settings_.endpoint.name() + ": " + std::string(why);
  std::deque<std::unique_ptr<Request>> lost;
  lost.swap(requests_);
  for (auto& request : lost) {
    if (!request->on_the_wire()) {
      requests_.push_back(std::move(request));
    } else if (request->kind == Kind::kCleanup) {
      // Its damaged record must still be deleted.
      end_item(*request, Status::kMiss, {});
      again(std::move(request));
    } else if (request->item && cause == Cause::kOurselves && request->kind != Kind::kDelete &&
               !request->item->stopped()) {
      // A repetition is harmless, except for a deletion's count.
      again(std::move(request));
    } else {
      end_item(*request, Status::kFault, last_error_);
    }
  }
  recount_send_window();
  if (cause == Cause::kOurselves) return;
  topology_.mark_stale();
  if (cause == Cause::kSilence) ++attempts_;
  if (attempts_ == 0) {
    next_dial_ = Clock::now();
  } else {
    back_off();
  }
  ++attempts_;
}

}  // namespace kvpool
