#include "resp.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <random>
#include <system_error>
#include <utility>

#include "resp_connection.h"

namespace kvpool {

class RespLane : public Lane {
 public:
  RespLane(RespBackend& backend, unsigned index)
      : woken_fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
        scratch_(kScratchNbytes),
        connection_(backend.node_, backend.counts_, backend.addresses_, scratch_,
                    std::random_device{}() + index) {
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
  // One round: whatever can be done at once, and a wait when that is nothing.
  void turn(Source& source) {
    const auto now = Clock::now();
    const bool woken = woken_.exchange(false, std::memory_order_acquire);
    if (woken) {
      eventfd_t count;
      [[maybe_unused]] const int ignored = eventfd_read(woken_fd_.get(), &count);
      more_ = true;
    }
    if (woken || now >= connection_.next_deadline()) connection_.give_up_stopped(now);
    connection_.dial(now);
    fill(source);
    if (!connection_.move()) wait();
  }

  void fill(Source& source) {
    while (more_ && (connection_.has_room() || connection_.refuses())) {
      auto item = source.try_next();
      if (!item) {
        more_ = false;
        return;
      }
      connection_.push(std::move(*item));
    }
  }

  void wait() {
    if (woken_.load(std::memory_order_acquire)) return;
    pollfd asked[2] = {{woken_fd_.get(), POLLIN, 0}, connection_.polled()};
    const auto until = connection_.wake_at();
    timespec left{};
    const bool bounded = until != Clock::time_point::max();
    if (bounded) {
      const auto ns = std::max<std::int64_t>(std::chrono::nanoseconds(until - Clock::now()).count(), 0);
      left = {ns / 1'000'000'000, ns % 1'000'000'000};
    }
    if (ppoll(asked, 2, bounded ? &left : nullptr, nullptr) <= 0) return;
    // wake() sets the flag before it writes: what is left of an earlier wake must not keep poll() from
    // waiting.
    if ((asked[0].revents & POLLIN) != 0) woken_.store(true, std::memory_order_relaxed);
    connection_.came(asked[1].revents);
  }

  void end(std::string_view why) {
    connection_.hang_up();
    connection_.end_all(why);
  }

  const Descriptor woken_fd_;
  std::atomic<bool> woken_{true};
  bool more_ = true;  // there may be items that nobody has taken
  std::vector<std::byte> scratch_;
  RespConnection connection_;
};

RespBackend::RespBackend(RespSettings settings)
    : node_(std::move(settings)), addresses_(resolve(node_.settings.endpoint)) {
  probe(node_.settings, addresses_);
}

std::unique_ptr<Lane> RespBackend::make_lane(unsigned index) {
  return std::make_unique<RespLane>(*this, index);
}

void RespBackend::append_counters(Counters& counters) const {
  const auto read = [](const auto& count) { return count.load(std::memory_order_relaxed); };
  std::uint64_t damaged = 0;
  for (std::size_t i = 1; i < kDamageCount; ++i) damaged += read(counts_.damaged[i]);
  counters.emplace_back("damaged", damaged);
  for (std::size_t i = 1; i < kDamageCount; ++i) {
    counters.emplace_back("damaged_" + std::string(damage_name(static_cast<Damage>(i))),
                          read(counts_.damaged[i]));
  }
  counters.emplace_back("evicted", 0);  // the server evicts, and tells nobody here
  counters.emplace_back("connections", read(counts_.connections));
  counters.emplace_back("disconnections", read(counts_.disconnections));
  counters.emplace_back("failed_dials", read(counts_.failed_dials));
  counters.emplace_back("up_connections", read(counts_.up));
}

}  // namespace kvpool
