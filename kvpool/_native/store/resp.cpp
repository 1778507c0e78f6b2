// An I/O thread of the server backend: its connections, the routing of items, and its poll().
#include "store/resp.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <deque>
#include <random>
#include <system_error>
#include <utility>
#include <vector>

#include "key/record.h"
#include "store/resp_connection.h"

namespace kvpool {

namespace {

// Followed servers that a redirect named but the topology lacks.
constexpr std::size_t kMaxStrangers = 16;
// Payload of a put's sendmsg, hashed just before it. Each may wake the server: by kChunkNbytes, which is all that a load
// under way has to wait for, a put of up to 2 MiB costs 3 to 20 % more CPU.
constexpr std::size_t kSendNbytes = 512 << 10;

}  // namespace

class RespIoThread : public IoThread {
  using Role = RespConnection::Role;

 public:
  RespIoThread(RespBackend& backend, unsigned index)
      : topology_(*backend.topology_),
        counts_(backend.counts_),
        random_(std::random_device{}() + index),
        woken_fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
        scratch_(kScratchNbytes) {
    if (!woken_fd_) throw std::system_error(errno, std::generic_category(), "eventfd");
  }

  void wake() noexcept override {
    woken_.store(true, std::memory_order_release);
    [[maybe_unused]] const int ignored = eventfd_write(woken_fd_.get(), 1);
  }

  void run(Source& source) override {
    try {
      while (!source.closing()) {
        turn(source);
      }
    } catch (...) {
      end("the store gave up in the middle of an operation");
      throw;
    }
    end("the store is closed");
  }

 private:
  // One round: all immediate work, and a wait if none.
  void turn(Source& source) {
    const auto now = Clock::now();
    const bool woken = woken_.exchange(false, std::memory_order_acquire);
    if (woken) {
      eventfd_t count;
      [[maybe_unused]] const int ignored = eventfd_read(woken_fd_.get(), &count);
      // close() wakes once, perhaps just now: nothing would end the next wait.
      if (source.closing()) return;
      more_reads_ = more_puts_ = true;
    }
    follow_topology(now);
    for (const auto& connection : connections_) {
      if (woken || now >= connection->next_deadline()) connection->give_up_stopped(now);
      connection->keep_up(now);
    }
    fill(source, now);
    const std::size_t most = is_reading() ? kChunkNbytes : kSendNbytes;
    bool moved = false;
    for (std::size_t i = 0; i < connections_.size(); ++i) {
      moved |= connections_[i]->move(now, most);
      for (auto& redirect : connections_[i]->take_redirected()) {
        follow(std::move(redirect));
        moved = true;
      }
    }
    if (!moved) wait();
  }

  bool is_reading() const {
    return std::any_of(connections_.begin(), connections_.end(), [](const auto& connection) {
      return connection->role() == Role::kReads && !connection->is_idle();
    });
  }

  // Two connections to each node of the map, for reads at twice the node's index and for puts after it; then
  // unfinished connections of former nodes, and redirects' targets.
  void follow_topology(Clock::time_point now) {
    const std::uint64_t version = topology_.version();
    if (version == version_) return;
    version_ = version;
    map_ = topology_.map();
    auto before = std::exchange(connections_, {});
    for (const auto& node : map_->nodes) {
      for (const Role role : {Role::kReads, Role::kWrites}) {
        const auto kept = std::find_if(before.begin(), before.end(), [&](const auto& connection) {
          return connection && &connection->node() == node.get() && connection->role() == role;
        });
        connections_.push_back(kept != before.end() ? std::move(*kept) : connect(node, role));
      }
    }
    std::vector<std::deque<Item>> waiting;
    for (auto& connection : before) {
      if (!connection) continue;
      waiting.push_back(connection->take_waiting());
      if (!connection->is_idle()) connections_.push_back(std::move(connection));
    }
    for (auto& items : waiting) {
      for (Item& item : items) route(std::move(item), now);
    }
  }

  std::unique_ptr<RespConnection> connect(std::shared_ptr<RespNode> node, Role role) {
    return std::make_unique<RespConnection>(std::move(node), role, topology_, counts_, uses_, scratch_,
                                            random_());
  }

  // Whether a connection has room; or all refuse, so that each item ends as a fault.
  bool takes(Role role, Clock::time_point now) const {
    bool room = false;
    bool refuse = true;
    for (std::size_t i = place(0, role); i < 2 * map_->nodes.size(); i += 2) {
      if (connections_[i]->is_clogged(now)) return false;
      room = room || connections_[i]->has_room();
      refuse = refuse && connections_[i]->refuses();
    }
    return room || refuse;
  }

  static std::size_t place(std::size_t node, Role role) { return 2 * node + (role == Role::kWrites ? 1 : 0); }

  // Reads before puts, and no put while reads wait; reads do not wait for puts.
  void fill(Source& source, Clock::time_point now) {
    std::vector<Item> taken;  // after an exception, unrouted items end as faults
    while ((more_reads_ || more_puts_) && takes(Role::kReads, now)) {
      const bool puts_too = more_puts_ && takes(Role::kWrites, now);
      if (!puts_too && !more_reads_) return;
      if (!source.try_take(taken, puts_too)) {
        more_reads_ = false;
        more_puts_ = more_puts_ && !puts_too;
        return;
      }
      for (Item& item : taken) route(std::move(item), now);
      taken.clear();
    }
  }

  void route(Item&& item, Clock::time_point now) {
    follow_topology(now);  // the map at the item's arrival, or a later one
    const std::size_t owner = map_->owner_of(item.key().text);
    const Role role = RespConnection::role_of(item);
    if (owner != SlotMap::kNobody) return connections_[place(owner, role)]->push(std::move(item));
    topology_.mark_stale();
    item.finish(Status::kFault, "no node serves slot " + std::to_string(slot_of(item.key().text)),
                Blame::kStore);
  }

  void follow(RespConnection::Redirect&& redirect) {
    const auto node = topology_.named(redirect.host, redirect.port);
    const std::string name = Endpoint{redirect.host, static_cast<std::uint16_t>(redirect.port), {}}.name();
    if (!node) {
      return RespConnection::end_redirected(std::move(redirect),
                                            name + ": a server sent us there, and it is not known yet");
    }
    const Role role = RespConnection::role_of(*redirect.request->item);
    auto found = std::find_if(connections_.begin(), connections_.end(), [&](const auto& connection) {
      return &connection->node() == node.get() && connection->role() == role;
    });
    if (found == connections_.end()) {
      if (connections_.size() >= 2 * (map_->nodes.size() + kMaxStrangers)) {
        return RespConnection::end_redirected(std::move(redirect), name + ": one server too many to follow");
      }
      connections_.push_back(connect(node, role));
      found = connections_.end() - 1;
    }
    (*found)->push_redirected(std::move(redirect.request));
  }

  void wait() {
    if (woken_.load(std::memory_order_acquire)) return;
    polled_.assign(1, {woken_fd_.get(), POLLIN, 0});
    auto until = Clock::time_point::max();
    for (const auto& connection : connections_) {
      polled_.push_back(connection->polled());
      until = std::min(until, connection->wake_at());
    }
    timespec left{};
    const bool bounded = until != Clock::time_point::max();
    if (bounded) {
      const auto ns = std::max<std::int64_t>(std::chrono::nanoseconds(until - Clock::now()).count(), 0);
      left = {ns / 1'000'000'000, ns % 1'000'000'000};
    }
    if (ppoll(polled_.data(), polled_.size(), bounded ? &left : nullptr, nullptr) <= 0) return;
    // wake() sets the flag before its write: a stale wake must not disable poll().
    if ((polled_[0].revents & POLLIN) != 0) woken_.exchange(true, std::memory_order_acq_rel);
    for (std::size_t i = 0; i < connections_.size(); ++i) connections_[i]->on_poll(polled_[i + 1].revents);
  }

  void end(std::string_view why) {
    for (const auto& connection : connections_) {
      connection->hang_up();
      connection->end_all(why);
    }
  }

  Topology& topology_;
  RespCounts& counts_;
  std::minstd_rand random_;
  std::uint64_t version_ = 0;
  std::shared_ptr<const SlotMap> map_;

  const Descriptor woken_fd_;
  std::atomic<bool> woken_{true};
  bool more_reads_ = true;  // untaken items may exist
  bool more_puts_ = true;
  RespUses uses_;
  std::vector<std::byte> scratch_;
  std::vector<std::unique_ptr<RespConnection>> connections_;
  std::vector<pollfd> polled_;
};

RespBackend::RespBackend(RespSettings settings) {
  auto addresses = resolve(settings.endpoint);
  probe(settings, addresses);
  topology_ = std::make_shared<Topology>(std::move(settings), std::move(addresses));
}

std::string RespBackend::shard_of(std::string_view key) const {
  const auto map = topology_->map();
  const std::size_t owner = map->owner_of(key);
  return owner == SlotMap::kNobody ? std::string() : map->nodes[owner]->settings.endpoint.name();
}

std::unique_ptr<IoThread> RespBackend::make_io_thread(unsigned index) {
  return std::make_unique<RespIoThread>(*this, index);
}

void RespBackend::append_counters(Counters& counters) const {
  const auto read = [](const auto& count) { return count.load(std::memory_order_relaxed); };
  counts_.damaged.append(counters);
  counters.emplace_back("evicted", 0);  // the server evicts without a report
  counters.emplace_back("connections", read(counts_.connections));
  counters.emplace_back("disconnections", read(counts_.disconnections));
  counters.emplace_back("failed_dials", read(counts_.failed_dials));
  counters.emplace_back("refused", read(counts_.refused));
  counters.emplace_back("up_connections", read(counts_.up));
  counters.emplace_back("moved", read(counts_.moved));
  counters.emplace_back("asked", read(counts_.asked));
}

}  // namespace kvpool
