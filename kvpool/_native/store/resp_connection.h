// One connection to one server, and its requests: payloads between the socket and the callers' buffers.
//
// A record is one HASH key (docs/explanation/stores.md): its bytes, the header last, in the fields of cut_record().
//
// A put is MULTI, HSET key b ... h ..., PEXPIRE, EXEC: no record lacks a time to live, wherever the
// connection is cut. Each part is hashed just before it is sent, and on arrival in a get, HMGET key b h.
//
// On one server, keys of one batch whose presence is asked for share a command: it answers how many are there, and unless
// that is all or none, each key is asked for by itself.
//
// A kPutAbsent is TOUCH key (EXISTS without that right), then a put on the same connection if the key is
// missing.
//
// An I/O thread has two connections to a server. One carries only puts and their presence tests: on a slow
// link its socket holds megabytes, for which no load has to wait.
//
// Requests beyond the send window wait beside it, up to a bound of bytes, and of items where they wait for long, so that
// a slow or silent server does not hold up the others of its I/O thread.
//
// Parts: resp_connection.cpp (requests), resp_reconnect.cpp, resp_replies.cpp, resp_presence.cpp (keys that share a
// command, times to live) and resp_records.cpp (records, sent and received).
//
// Belongs to one I/O thread, the only caller. Nothing blocks, except the resolver (see find_addresses) and a
// dial's files.
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
#include "store/resp_dial.h"
#include "store/resp_node.h"
#include "store/resp_parser.h"
#include "store/resp_request.h"
#include "store/stream.h"
#include "store/topology.h"

namespace kvpool {

// Received bytes pass through it, except large payloads; empty between two calls.
inline constexpr std::size_t kScratchNbytes = 64 * 1024;

class RespConnection {
 public:
  using Request = RespRequest;
  enum class Role : std::uint8_t { kReads, kWrites };  // all but puts; puts, dialled at the first
  static Role role_of(const Item& item) { return is_put(item.op()) ? Role::kWrites : Role::kReads; }
  // Another server for a request, in this server's words.
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
  // Whether it can send more now: connected, not suspect, send window not full, and no item waits.
  bool has_room() const { return is_open() && waiting_.empty(); }
  // No connection of this store to the server stands, so waiting is not worth a request's time.
  bool refuses() const { return !up_ && (socket_ || failing_) && node_->up.load() == 0; }
  // What waits for the send window has reached its bound: take no items.
  bool is_clogged(Clock::time_point now) const { return now < clogged_until(); }
  bool is_idle() const { return requests_.empty() && waiting_.empty(); }

  // Sends it, queues it, or ends it as a fault: when it refuses, or too many wait.
  void push(Item&& taken);
  void push_redirected(std::unique_ptr<Request> request);
  // Dials when unconnected, or after another connection to this server fell silent.
  void keep_up(Clock::time_point now);
  // Sends and receives without waiting; false when nothing moved. `most`: payload to send, about.
  bool move(Clock::time_point now, std::size_t most);
  std::vector<Redirect> take_redirected() { return std::exchange(redirected_, {}); }
  std::deque<Item> take_waiting();
  // Ends cancelled and late items. Releases their buffers at once; while bytes move, reads their replies to
  // the end, so that other items on this connection do not suffer.
  void give_up_stopped(Clock::time_point now);
  // Ends every item as a fault.
  void end_all(std::string_view why);
  static void end_redirected(Redirect&& redirect, std::string words);
  void hang_up();

  // Events for poll(), and the latest next call; then poll()'s result.
  pollfd polled() const;
  Clock::time_point wake_at() const;
  Clock::time_point next_deadline() const { return next_deadline_; }
  void on_poll(short events);

 private:
  static constexpr const char* kUnexpected = "its reply does not fit what it was asked";

  // Why a connection ends.
  enum class Cause : std::uint8_t {
    kServer,    // it closed, or sent nonsense
    kSilence,   // no reply before the deadline
    kOurselves  // a large put was cancelled midway: the server is fine
  };

  bool awaiting() const;
  bool is_open() const;
  // The link's capacity, within bounds.
  std::size_t send_window_nbytes() const;
  // Of the server's records in the direction that `kind` moves; none: it moves none.
  RefusedSize* refused(Request::Kind kind) const;
  Clock::time_point clogged_until() const;
  bool is_silent(const Request& request, Clock::time_point now) const;

  void dial(Clock::time_point now);
  void check_after_silence(Clock::time_point now);
  void count_up(bool up);
  bool find_addresses();
  void back_off();
  // Wait of requests for a dial's first attempt: unbounded before any connection stood.
  Clock::duration grace() const;
  void fail_all();
  void end_by_server(std::string_view why);
  void lose(Cause cause, std::string_view why);
  void again(std::unique_ptr<Request> request);
  static void end_item(Request& request, Status status, std::string words, Blame blame = Blame::kUnknown);

  Request::Kind kind_of(Op op) const;
  void begin(Item&& taken);
  void begin_waiting();
  void add(std::unique_ptr<Request> request);
  bool let_go(Request& request, Status status, Clock::time_point now);
  void release_send_window(Request& request, std::size_t nbytes);
  void recount_send_window();

  bool send_some(std::size_t most);
  bool gather(Request& request, std::size_t most, iovec* parts, std::size_t& count,
              std::size_t& nbytes) const;
  static void hash_up_to(Request& request, std::size_t until);
  void make_end(Request& request) const;
  void advance(std::size_t nbytes);

  bool receive_some();
  std::size_t wanted_nbytes(bool in_payload) const;
  std::string parse_replies(std::span<const std::byte> input);
  void on_bulk(Request& request, std::span<const std::byte> piece);
  void on_payload(Request& request, std::size_t nbytes);
  std::string on_token(Request& request, const RespToken& token);
  std::string shown(std::string_view words) const { return kvpool::shown(words, password_); }
  std::string unasked(const RespToken& token, const char* otherwise);
  std::string on_error(Request& request, std::string_view text);
  bool note_refusal(Request& request, std::string_view word, std::string_view text);
  void go_on(Request& answered, Request::Kind kind);
  void end_joined(Request& answered, std::size_t present);
  void ask_each(Request& answered, Request::Kind kind);
  std::string on_age(Request& request, const RespToken& token);
  std::string on_put_token(Request& request, const RespToken& token);
  void on_put_error(Request& request, std::string_view error);
  std::string on_get_token(Request& request, const RespToken& token);
  std::string on_field(Request& request, std::uint64_t nbytes);
  void end_get(Request& request);
  void clean_up(Request& damaged);
  void end_front(Status status, std::string words, Blame blame = Blame::kUnknown);
  std::unique_ptr<Request> look_at(const Item& used, Request::Kind kind);
  bool note_redirect(Request& request, std::string_view text) const;
  void redirect_front();

  const std::shared_ptr<RespNode> node_;
  const Role role_;
  Topology& topology_;
  RespCounts& counts_;
  RespUses& uses_;
  const RespSettings& settings_;
  std::string password_;                  // of the last dial that was ready
  std::vector<SocketAddress> addresses_;  // of the present dial, or the last
  const std::span<std::byte> scratch_;

  std::optional<Dial> dial_;  // at most one of dial_ and socket_
  Stream socket_;
  RespParser parser_;
  std::string said_;                        // an error that may be why the server hangs up, in its words
  bool is_wanted_ = role_ == Role::kReads;  // dial it
  bool readable_ = false;                   // by poll()
  bool is_full_ = false;                    // the socket did not take all bytes
  bool touches_ = true;                     // until refused: TOUCH
  bool joins_ = false;                      // several keys in one command: on one server, until refused
  bool renews_ = true;                      // until refused: reading and changing times to live
  std::chrono::microseconds round_trip_{};  // the shortest, at connect
  bool up_ = false;                         // connected, and not suspect
  std::uint64_t seen_silences_ = 0;         // of all connections to this server, when this one was last alive
  bool failing_ = false;                    // unconnected after a failed attempt: items are faults at once
  bool stood_ = false;                      // it was once connected
  unsigned attempts_ = 0;                   // failures since the last good reply
  Clock::time_point next_dial_{};
  Clock::time_point dialled_at_{};  // begin of dial_
  std::string last_error_;
  std::minstd_rand random_;

  std::deque<std::unique_ptr<Request>> requests_;  // in the order of their replies
  std::size_t first_unsent_ = 0;                   // all before it are wholly sent
  std::size_t in_flight_nbytes_ = 0;               // sum of all `cost_left`
  struct Waiting {
    Item item;
    Clock::time_point since;
  };
  std::deque<Waiting> waiting_;  // for room
  std::size_t waiting_nbytes_ = 0;
  std::vector<Redirect> redirected_;
  // Time of the last byte received, or taken by a full socket, or of the first pending reply.
  Clock::time_point moved_at_ = Clock::now();
  Clock::time_point next_deadline_ = Clock::time_point::max();
};

}  // namespace kvpool
