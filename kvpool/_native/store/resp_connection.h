// One connection to one server, and the requests on it: payloads between the socket and the callers' buffers.
//
// A record is one HASH key (docs/explanation/stores.md):
//   h   the record's header, then the last min(128, n) bytes of the payload
//   b   the payload bytes before those; an empty string when there are none
//
// PUT asks MULTI, HSET key b ... h ..., PEXPIRE, EXEC: no record without a time to live, wherever a connection is cut.
// The header holds the checksum of the whole payload, so it has to be sent last for a chunk to be hashed just before
// it is sent: hence b before h. GET asks HMGET key h b: there the header comes first, and each chunk of b is hashed as
// it arrives.
//
// A kPutAbsent asks TOUCH key (EXISTS where that is not allowed), and goes on as a put of the same connection if the key
// is missing.
//
// An I/O thread has two connections to a server, one of which carries nothing but puts and what they ask: on a slow link the
// socket of that one holds megabytes which no load has to wait for.
//
// What does not fit into its send window waits beside it, up to a bound, so that a server that is slow or silent does
// not hold up the others of its I/O thread.
//
// Its parts: resp_connection.cpp (requests), resp_reconnect.cpp, resp_sending.cpp, resp_replies.cpp and, for records
// that come, resp_records.cpp.
//
// It belongs to one I/O thread, whose thread alone calls it. Nothing here blocks, except the resolver (see
// find_addresses).
#pragma once

#include <poll.h>
#include <sys/uio.h>

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "store/io_executor.h"
#include "store/resp_counts.h"
#include "store/resp_dial.h"
#include "store/resp_node.h"
#include "store/resp_parser.h"
#include "store/resp_request.h"
#include "store/resp_uses.h"
#include "store/stream.h"
#include "store/topology.h"

namespace kvpool {

// What is received goes through it, except large payloads; nothing is kept in it between two calls.
inline constexpr std::size_t kScratchNbytes = 64 * 1024;

class RespConnection {
 public:
  using Request = RespRequest;
  enum class Role : std::uint8_t { kReads, kWrites };  // all but puts; puts, and not dialled before the first
  static Role role_of(const Item& item) { return is_put(item.op()) ? Role::kWrites : Role::kReads; }
  // A request that another server is to serve, in the words of this one.
  struct Redirect {
    std::unique_ptr<Request> request;
    std::string host;
    unsigned port;
  };

  // `scratch`: kScratchNbytes, of the I/O thread, as are `uses`.
  RespConnection(std::shared_ptr<RespNode> node, Role role, Topology& topology, RespCounts& counts,
                 RespUses& uses, std::span<std::byte> scratch, unsigned seed);
  RespConnection(const RespConnection&) = delete;
  RespConnection& operator=(const RespConnection&) = delete;
  ~RespConnection();

  const RespNode& node() const { return *node_; }
  Role role() const { return role_; }
  // Whether it sends more at once: it is connected and not suspect, its send window is not full, and no item waits.
  bool has_room() const { return is_open() && waiting_.empty(); }
  // While no connection of this store to the server stands, waiting for one is not worth a request's time.
  bool refuses() const { return !up_ && (socket_ || failing_) && node_->up.load() == 0; }
  // As much waits for the send window as may, while the server moves bytes: the I/O thread takes nothing more meanwhile.
  bool is_clogged(Clock::time_point now) const;
  // Nothing is on it or waits for it.
  bool is_idle() const { return requests_.empty() && waiting_.empty(); }

  // Sends it, lets it wait, or ends it as a fault: when it refuses, or too many wait.
  void push(Item&& taken);
  void push_redirected(std::unique_ptr<Request> request);
  // Dials while there is no connection, and when another one to this server fell silent.
  void keep_up(Clock::time_point now);
  // Sends and receives what can be at once; false when that is nothing.
  bool move(Clock::time_point now);
  std::vector<Redirect> take_redirected() { return std::exchange(redirected_, {}); }
  std::deque<Item> take_waiting();
  // Ends the items that were cancelled or whose time has run out. Their buffers are let go at once; while anything
  // moves, their replies are read to their end, so that the others on this connection do not suffer.
  void give_up_stopped(Clock::time_point now);
  // Everything on it is a fault.
  void end_all(std::string_view why);
  static void end_redirected(Redirect&& redirect, std::string words);
  void hang_up();

  // What to poll for, and when to call again at the latest; then what poll() said.
  pollfd polled() const;
  Clock::time_point wake_at() const;
  Clock::time_point next_deadline() const { return next_deadline_; }
  void on_poll(short events);

 private:
  static constexpr const char* kUnexpected = "its reply does not fit what it was asked";

  // Why a connection is given up.
  enum class Cause : std::uint8_t {
    kServer,    // it closed, or what it says cannot be understood
    kSilence,   // no reply before the deadline
    kOurselves  // a large put was cancelled in the middle: the server is fine
  };

  bool awaiting() const;
  bool is_open() const;
  // As much as the link holds, within bounds.
  std::size_t send_window_nbytes() const;
  bool is_quiet(Clock::time_point now) const;
  bool is_silent(const Request& request, Clock::time_point now) const;

  void dial(Clock::time_point now);
  void check_after_silence(Clock::time_point now);
  void count_up(bool up);
  bool find_addresses();
  void back_off();
  // How long requests wait for the first attempt of a dial: where nothing has stood yet, as long as it takes.
  Clock::duration grace() const;
  void fail_all();
  void lose(Cause cause, std::string_view why);
  void again(std::unique_ptr<Request> request);
  static void end_item(Request& request, Status status, std::string words);

  void begin(Item&& taken);
  void begin_waiting();
  void add(std::unique_ptr<Request> request);
  bool let_go(Request& request, Status status, Clock::time_point now);
  void release_send_window(Request& request, std::size_t nbytes);
  void recount_send_window();

  bool send_some();
  bool gather(Request& request, iovec* parts, std::size_t& count, std::size_t& nbytes) const;
  static void hash_up_to(Request& request, std::size_t until);
  void make_end(Request& request) const;
  void advance(std::size_t nbytes);

  bool receive_some();
  std::size_t wanted_nbytes(bool in_body) const;
  std::string parse_replies(std::span<const std::byte> input);
  void on_bulk(Request& request, std::span<const std::byte> piece);
  void on_body(Request& request, std::size_t nbytes);
  std::string on_token(Request& request, const RespToken& token);
  std::string on_error(Request& request, std::string_view text);
  bool note_refusal(Request& request, std::string_view word, std::string_view text);
  void go_on(Request& answered, Request::Kind kind);
  std::string on_age(Request& request, const RespToken& token);
  std::string on_put_token(Request& request, const RespToken& token);
  void on_put_error(Request& request, std::string_view text);
  std::string on_get_token(Request& request, const RespToken& token);
  static void check_h(Request& request);
  std::string on_body_begin(Request& request, std::uint64_t nbytes);
  std::string too_large(Request& request);
  void end_get(Request& request);
  void clean_up(Request& damaged);
  void end_front(Status status, std::string words);
  std::unique_ptr<Request> look_at(const Request& used);
  bool note_redirect(Request& request, std::string_view text) const;
  void redirect_front();

  const std::shared_ptr<RespNode> node_;
  const Role role_;
  Topology& topology_;
  RespCounts& counts_;
  RespUses& uses_;
  const RespSettings& settings_;
  std::vector<SocketAddress> addresses_;  // of the dial under way, or of the last one
  const std::span<std::byte> scratch_;

  std::optional<Dial> dial_;  // at most one of dial_ and socket_
  Stream socket_;
  RespParser parser_;
  bool is_wanted_ = role_ == Role::kReads;  // it is dialled
  bool readable_ = false;                   // poll() said so
  bool is_full_ = false;                    // the socket did not take all that it was given
  bool touches_ = true;                     // this user may TOUCH, as far as is known
  bool renews_ = true;                      // and ask for times to live, and change them
  std::chrono::microseconds round_trip_{};  // the shortest, when it was connected
  bool up_ = false;                         // connected, and not suspect
  std::uint64_t seen_silences_ = 0;         // of all connections to this server, when this one last was not
  bool failing_ = false;   // not connected, and the last attempt failed: items are faults at once
  bool stood_ = false;     // it was connected once
  unsigned attempts_ = 0;  // failures since the last good reply
  Clock::time_point next_dial_{};
  Clock::time_point dialled_at_{};  // when dial_ began
  std::string last_error_;
  std::minstd_rand random_;

  std::deque<std::unique_ptr<Request>> requests_;  // in the order of their replies
  std::size_t first_unsent_ = 0;                   // those before it are wholly sent
  std::size_t in_flight_nbytes_ = 0;               // what `cost_left` of all sums up to
  std::deque<Item> waiting_;                       // for room
  std::size_t waiting_nbytes_ = 0;
  std::vector<Redirect> redirected_;
  // When something last came, or was taken by a socket that had been full, or began to be awaited.
  Clock::time_point moved_at_ = Clock::now();
  Clock::time_point next_deadline_ = Clock::time_point::max();
};

}  // namespace kvpool
