// One attempt to reach a server: connect, TLS, AUTH, SELECT, a name, PING. It hands over a connection that
// answered all of them, with nothing left unread.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "store/io_executor.h"
#include "store/resp_parser.h"
#include "store/socket.h"
#include "store/stream.h"
#include "store/tls.h"

namespace kvpool {

struct RespSettings {
  Endpoint endpoint;
  std::string user;                // empty: the default user
  std::string password;            // empty: no AUTH
  std::string password_file;       // its path, read at each dial; empty: `password`
  std::shared_ptr<TlsSource> tls;  // none: in plain
  unsigned database = 0;
  std::chrono::milliseconds ttl{86'400'000};
  std::string client;   // names connections in CLIENT LIST; empty: unnamed
  std::string version;  // of this library, in CLIENT LIST; empty: omitted
};

// A server's text for display: one short printable line, without the password.
std::string shown(std::string_view words, const std::string& password);

// The one that says what kind of error it is: the rest is prose.
std::string_view first_word(std::string_view words);

// How an error reply ends an item: kFault where it concerns all that the server is asked for, kRefused where it is about
// the key: too large, of another type, not this user's.
Status error_status(std::string_view words);

// The server refused; what() has its words.
struct RespError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// "$6\r\nEXISTS\r\n"
void append_word(std::string& to, std::string_view word);
// "*2\r\n$6\r\nEXISTS\r\n$1\r\nk\r\n"
void append_command(std::string& to, std::span<const std::string_view> words);
inline void append_command(std::string& to, std::initializer_list<std::string_view> words) {
  append_command(to, std::span(words.begin(), words.size()));
}

inline constexpr auto kDialPatience = std::chrono::seconds(2);

class Dial {
 public:
  enum class State : std::uint8_t { kUnderWay, kReady, kFailed };

  // Reads the files of password and TLS. Gives up at `now` + 2 s, and on a silent address after its share of
  // `connect_within`.
  Dial(const RespSettings& settings, const std::vector<SocketAddress>& addresses, std::string_view role,
       Clock::time_point now, Clock::duration connect_within = kDialPatience);

  // Advances as far as it can. Never blocks.
  State step(Clock::time_point now);

  // Until finished: events for poll(), and the latest next step().
  int fd() const { return stream_.fd(); }
  short events() const;
  Clock::time_point wake_at() const { return std::min(deadline_, address_deadline_); }

  // Once ready.
  Stream take() { return std::move(stream_); }
  const std::string& password() const { return password_; }
  // Once failed. `error_number` is 0 for a refusal in the server's own words.
  const std::string& error() const { return error_; }
  int error_number() const { return error_number_; }

 private:
  enum class Phase : std::uint8_t { kUnusable, kNextAddress, kConnecting, kHandshake, kGreeting };

  State fail(int error_number, std::string words);
  void begin_next(Clock::time_point now);
  State greet();

  const RespSettings& settings_;
  const std::vector<SocketAddress>& addresses_;
  const Clock::time_point deadline_;
  const Clock::duration address_patience_;
  Clock::time_point address_deadline_;
  std::size_t next_address_ = 0;
  Phase phase_ = Phase::kNextAddress;
  std::string password_;
  std::shared_ptr<const TlsContext> tls_;
  Stream stream_;
  std::string greeting_;
  std::size_t sent_ = 0;
  std::vector<std::string> asked_;  // the commands of the greeting, by name
  std::size_t answered_ = 0;
  std::string refusal_;  // the first error that no dial survives, with its command
  std::string said_;     // the last error, which may be why the server hangs up
  RespParser parser_;
  int error_number_ = 0;
  std::string error_;
};

// "DENIED ..." and such: why a server hung up, in its own words.
std::string hung_up(std::string_view said);

// Dials once and hangs up, so that wrong settings are reported early. Blocks for at most 2 s an address.
// Throws Unreachable or RespError.
void probe(const RespSettings& settings, const std::vector<SocketAddress>& addresses);

}  // namespace kvpool
