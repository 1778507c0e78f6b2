// The steps of a dial, and the greeting with its answers.
#include "store/resp_dial.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

namespace kvpool {
namespace {

constexpr std::size_t kShownChars = 200;
constexpr const char* kSurplus = "the server sent more than it was asked for";

constexpr std::size_t kMaxPasswordNbytes = 4096;

// The line in a password's file. Throws Unreachable.
std::string read_password(const std::string& path) {
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file && !is_regular(file.get()))
    throw Unreachable(EINVAL, path + ": the password cannot be read: it is not a file");
  std::string password(kMaxPasswordNbytes + 1, '\0');
  const ssize_t n = file ? read(file.get(), password.data(), password.size()) : -1;
  if (n < 0) throw Unreachable(errno, path + ": the password cannot be read: " + words_of(errno));
  password.resize(static_cast<std::size_t>(n));
  while (!password.empty() && (password.back() == '\n' || password.back() == '\r')) password.pop_back();
  if (!password.empty() && password.size() <= kMaxPasswordNbytes) return password;
  throw Unreachable(EINVAL, path + ": it holds no password");
}

// Whether an error refuses the user, not the connection: nothing later changes it.
bool refuses_user(std::string_view text) {
  const std::string_view word = first_word(text);
  return word == "WRONGPASS" || word == "NOAUTH" || word == "NOPERM";
}

}  // namespace

std::string_view first_word(std::string_view words) { return words.substr(0, words.find(' ')); }

Status error_status(std::string_view words) {
  constexpr std::array<std::string_view, 13> kOfServers = {
      "ASK",    "BUSY",       "CLUSTERDOWN", "LOADING",  "MASTERDOWN", "MISCONF",  "MOVED",
      "NOAUTH", "NOREPLICAS", "READONLY",    "TRYAGAIN", "UNKILLABLE", "WRONGPASS"};
  return std::ranges::find(kOfServers, first_word(words)) == kOfServers.end() ? Status::kRefused
                                                                              : Status::kFault;
}

std::string shown(std::string_view words, const std::string& password) {
  std::string line(words);
  // The replacement of a shorter one would spell it.
  if (password.size() >= 4) {
    for (std::size_t at = line.find(password); at != std::string::npos; at = line.find(password, at + 3)) {
      line.replace(at, password.size(), "***");
    }
  }
  if (line.size() > kShownChars) line.resize(kShownChars);
  for (char& c : line) {
    if (c < ' ' || c > '~') c = '?';
  }
  return line;
}

std::string hung_up(std::string_view said) {
  return "the server says \"" + std::string(said) + "\" and hangs up";
}

void append_word(std::string& to, std::string_view word) {
  to.append("$").append(std::to_string(word.size())).append("\r\n").append(word).append("\r\n");
}

void append_command(std::string& to, std::span<const std::string_view> words) {
  to.append("*").append(std::to_string(words.size())).append("\r\n");
  for (const std::string_view word : words) append_word(to, word);
}

Dial::Dial(const RespSettings& settings, const std::vector<SocketAddress>& addresses, std::string_view role,
           Clock::time_point now, Clock::duration connect_within)
    : settings_(settings),
      addresses_(addresses),
      deadline_(now + kDialPatience),
      address_patience_(connect_within / std::max<std::size_t>(addresses.size(), 1)),
      address_deadline_(deadline_) {
  try {
    password_ = settings.password_file.empty() ? settings.password : read_password(settings.password_file);
    if (settings.tls) tls_ = settings.tls->context();
  } catch (const Unreachable& error) {
    phase_ = Phase::kUnusable;
    error_number_ = error.error_number();
    error_ = error.what();
  }
  if (!password_.empty()) {
    asked_.emplace_back("AUTH");
    if (settings.user.empty()) {
      append_command(greeting_, {"AUTH", password_});
    } else {
      append_command(greeting_, {"AUTH", settings.user, password_});
    }
  }
  if (settings.database != 0) {
    asked_.emplace_back("SELECT");
    append_command(greeting_, {"SELECT", std::to_string(settings.database)});
  }
  if (!settings.client.empty()) {
    const auto tell = [&](std::initializer_list<std::string_view> words) {
      asked_.emplace_back("CLIENT");
      append_command(greeting_, words);
    };
    tell({"CLIENT", "SETNAME", "kvpool:" + std::string(role) + ":" + settings.client});
    tell({"CLIENT", "SETINFO", "LIB-NAME", "kvpool"});
    if (!settings.version.empty()) tell({"CLIENT", "SETINFO", "LIB-VER", settings.version});
  }
  // A stopped server still accepts connections: only an answer proves life.
  asked_.emplace_back("PING");
  append_command(greeting_, {"PING"});
}

short Dial::events() const {
  if (phase_ == Phase::kConnecting) return POLLOUT;
  return stream_.events(phase_ == Phase::kGreeting && sent_ < greeting_.size());
}

Dial::State Dial::fail(int error_number, std::string words) {
  stream_.reset();
  error_number_ = error_number;
  error_ = settings_.endpoint.name() + ": " + std::move(words);
  return State::kFailed;
}

void Dial::begin_next(Clock::time_point now) {
  error_number_ = 0;
  Descriptor fd = begin_connect(addresses_[next_address_++], error_number_);
  phase_ = fd ? Phase::kConnecting : Phase::kNextAddress;
  if (fd && tls_) {
    stream_ = Stream(std::move(fd), *tls_, settings_.endpoint.host);
  } else {
    stream_ = Stream(std::move(fd));
  }
  address_deadline_ = std::min(now + address_patience_, deadline_);
}

Dial::State Dial::step(Clock::time_point now) {
  for (;;) {
    if (now >= deadline_) {
      return fail(ETIMEDOUT, phase_ == Phase::kHandshake  ? "the server does not answer the TLS handshake"
                             : phase_ == Phase::kGreeting ? "the server does not answer"
                                                          : "the connection timed out");
    }
    switch (phase_) {
      case Phase::kUnusable:
        return fail(error_number_, error_);
      case Phase::kNextAddress:
        if (next_address_ == addresses_.size()) return fail(error_number_, words_of(error_number_));
        begin_next(now);
        break;
      case Phase::kConnecting: {
        bool under_way = false;
        if (connected(stream_.fd(), under_way, error_number_)) {
          phase_ = Phase::kHandshake;
          address_deadline_ = deadline_;  // no other address is tried
          break;
        }
        if (under_way && now < address_deadline_) return State::kUnderWay;
        if (under_way) error_number_ = ETIMEDOUT;
        stream_.reset();
        phase_ = Phase::kNextAddress;
        break;
      }
      case Phase::kHandshake: {
        const Stream::Result result = stream_.handshake();
        if (result.state == Stream::State::kBlocked) return State::kUnderWay;
        if (result.state != Stream::State::kMoved) return fail(EPROTO, "TLS handshake: " + stream_.error());
        phase_ = Phase::kGreeting;
        break;
      }
      case Phase::kGreeting:
        return greet();
    }
  }
}

Dial::State Dial::greet() {
  while (sent_ < greeting_.size() || stream_.owes()) {
    const iovec part{greeting_.data() + sent_, greeting_.size() - sent_};
    const Stream::Result result = stream_.send({&part, sent_ < greeting_.size() ? 1U : 0U});
    // Receiving reports failures: a closing server's last words are worth more.
    if (result.state != Stream::State::kMoved) break;
    sent_ += result.nbytes;
  }
  std::array<std::byte, 512> piece;
  for (;;) {
    const iovec part{piece.data(), piece.size()};
    const Stream::Result result = stream_.receive({&part, 1});
    // Reads until empty: a surplus reply must not answer the first request.
    if (result.state == Stream::State::kBlocked) {
      if (answered_ < asked_.size()) return State::kUnderWay;
      return refusal_.empty() ? State::kReady : fail(0, refusal_);
    }
    if (result.state != Stream::State::kMoved) {
      // An error with which it hangs up answers no command: it concerns the connection.
      return fail(ECONNRESET, said_.empty() ? stream_.error() : hung_up(said_));
    }
    std::span<const std::byte> input(piece.data(), result.nbytes);
    if (answered_ == asked_.size()) return fail(EPROTO, kSurplus);
    while (const auto token = parser_.next(input)) {
      const std::string& command = asked_[answered_];
      if (token->kind == RespKind::kError) {
        // A refused PING is still an answer; names are for operators, and old servers lack some.
        const bool alive = command == "CLIENT" || (command == "PING" && first_word(token->text) == "NOPERM");
        said_ = shown(token->text, password_);
        if (!alive && refusal_.empty()) refusal_ = command + ": " + said_;
        if (!alive && refuses_user(token->text)) return fail(0, refusal_);
      } else if (token->kind != RespKind::kSimple) {
        return fail(EPROTO, "no Redis or Valkey server: it answers " + command + " with something else");
      }
      if (++answered_ == asked_.size() && !input.empty()) return fail(EPROTO, kSurplus);
    }
  }
}

void probe(const RespSettings& settings, const std::vector<SocketAddress>& addresses) {
  Dial dial(settings, addresses, "probe", Clock::now());
  for (;;) {
    switch (dial.step(Clock::now())) {
      case Dial::State::kReady:
        return;
      case Dial::State::kFailed:
        if (dial.error_number() == 0) throw RespError(dial.error());
        throw Unreachable(dial.error_number(), dial.error());
      case Dial::State::kUnderWay:
        break;
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(dial.wake_at() - Clock::now());
    pollfd asked{dial.fd(), dial.events(), 0};
    poll(&asked, 1, static_cast<int>(std::clamp<long>(left.count(), 0, 10'000)));
  }
}

}  // namespace kvpool
