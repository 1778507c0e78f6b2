// Sends, receives and handshakes, in plain and through OpenSSL.
#include "store/stream.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509_vfy.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <new>
#include <optional>
#include <vector>

namespace kvpool {
namespace {

constexpr std::size_t kRecordNbytes = SSL3_RT_MAX_PLAIN_LENGTH;  // 16 KiB
// Shorter parts are copied into one record: cheaper than a record and a system call each.
constexpr std::size_t kOwnRecordNbytes = 4096;
// A record, and OpenSSL's own messages; a peer that causes more does not read.
constexpr std::size_t kMaxOwedNbytes = 256 << 10;

constexpr const char* kClosedWords = "the server closed the connection";

bool would_block(int error_number) {
  return error_number == EAGAIN || error_number == EWOULDBLOCK || error_number == EINTR;
}

}  // namespace

// `bio` points to it, so it never moves.
struct Stream::Tls {
  Tls(int socket, const TlsContext& context, const std::string& host)
      : fd(socket), ssl(context.session(host)) {
    BIO* bio = BIO_new(method());
    if (bio == nullptr) throw std::bad_alloc();
    BIO_set_data(bio, this);
    BIO_set_init(bio, 1);
    SSL_set_bio(ssl.get(), bio, bio);  // owns it
  }

  static const BIO_METHOD* method() {
    struct Free {
      void operator()(BIO_METHOD* one) const { BIO_meth_free(one); }
    };
    // OpenSSL's own socket BIO raises SIGPIPE, and requires a half-sent record to be written again.
    static const std::unique_ptr<BIO_METHOD, Free> shared = [] {
      std::unique_ptr<BIO_METHOD, Free> made(
          BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "kvpool stream"));
      if (!made) throw std::bad_alloc();
      BIO_meth_set_read_ex(made.get(), &Tls::read);
      BIO_meth_set_write_ex(made.get(), &Tls::write);
      BIO_meth_set_ctrl(made.get(), &Tls::control);
      return made;
    }();
    return shared.get();
  }

  // OpenSSL's callbacks for ciphertext: 1, or 0 with the BIO's retry flag set or not.
  static int read(BIO* bio, char* data, std::size_t size, std::size_t* nbytes) {
    auto& self = *static_cast<Tls*>(BIO_get_data(bio));
    BIO_clear_retry_flags(bio);
    const ssize_t n = recv(self.fd, data, size, MSG_DONTWAIT);
    if (n > 0) {
      *nbytes = static_cast<std::size_t>(n);
      return 1;
    }
    if (n == 0) {
      self.ended = true;
    } else if (would_block(errno)) {
      BIO_set_retry_read(bio);
    } else {
      self.receive_error = errno;
    }
    return 0;
  }
  static int write(BIO* bio, const char* data, std::size_t size, std::size_t* nbytes) {
    auto& self = *static_cast<Tls*>(BIO_get_data(bio));
    BIO_clear_retry_flags(bio);
    const auto* bytes = reinterpret_cast<const std::byte*>(data);
    const std::size_t sent = self.owes() ? 0 : self.send_now(bytes, size);
    if (self.owed.size() + size - sent > kMaxOwedNbytes) return 0;
    // After an error too, so that OpenSSL can still read a closing peer's last words.
    if (self.send_error == 0) self.owed.insert(self.owed.end(), bytes + sent, bytes + size);
    *nbytes = size;
    return 1;
  }
  static long control(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1 : 0; }

  bool owes() const { return !owed.empty(); }
  // Sends owed bytes, as much as fits.
  void flush() {
    const std::size_t sent = send_now(owed.data(), owed.size());
    owed.erase(owed.begin(), owed.begin() + static_cast<std::ptrdiff_t>(sent));
    if (send_error != 0) owed.clear();
  }

  std::size_t send_now(const std::byte* data, std::size_t size) {
    std::size_t sent = 0;
    while (sent < size && send_error == 0) {
      const ssize_t n = ::send(fd, data + sent, size - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && would_block(errno)) break;
      if (n < 0) {
        send_error = errno;
      } else {
        sent += static_cast<std::size_t>(n);
      }
    }
    return sent;
  }

  const int fd;
  TlsContext::Session ssl;
  std::vector<std::byte> owed;   // ciphertext not yet taken by the socket
  int send_error = 0;            // an errno: sending is over. The peer's last words may still come
  int receive_error = 0;         // an errno: receiving is over
  bool ended = false;            // the peer closed its side
  std::optional<Result> result;  // final result of receiving; the session must not be used again
  std::array<std::byte, kRecordNbytes> gathered;
};

Stream::Stream() = default;
Stream::Stream(Descriptor fd) : fd_(std::move(fd)) {}
Stream::Stream(Descriptor fd, const TlsContext& tls, const std::string& host)
    : fd_(std::move(fd)), tls_(std::make_unique<Tls>(fd_.get(), tls, host)) {}
Stream::Stream(Stream&& other) noexcept = default;
Stream& Stream::operator=(Stream&& other) noexcept = default;
Stream::~Stream() = default;

void Stream::reset() {
  tls_.reset();
  fd_.reset();
}

bool Stream::owes() const { return tls_ && tls_->owes(); }

bool Stream::has_pending() const { return tls_ && (tls_->result || SSL_has_pending(tls_->ssl.get()) == 1); }

short Stream::events(bool sends) const {
  return static_cast<short>(sends || owes() ? POLLIN | POLLOUT : POLLIN);
}

Stream::Result Stream::fail(State state, std::string words) {
  error_ = std::move(words);
  return {state};
}

Stream::Result Stream::blocked_or_failed(int error_number) {
  if (would_block(error_number)) return {State::kBlocked};
  return fail(State::kFailed, words_of(error_number));
}

Stream::Result Stream::handshake() {
  if (!tls_) return {State::kMoved};
  if (tls_->owes()) tls_->flush();
  ERR_clear_error();
  const int returned = SSL_do_handshake(tls_->ssl.get());
  return returned == 1 ? Result{State::kMoved} : tls_failed(returned);
}

Stream::Result Stream::send(std::span<const iovec> parts) {
  if (tls_) return tls_send(parts);
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts.data());
  message.msg_iovlen = parts.size();
  const ssize_t n = sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  return n < 0 ? blocked_or_failed(errno) : Result{State::kMoved, static_cast<std::size_t>(n)};
}

Stream::Result Stream::receive(std::span<const iovec> parts) {
  if (tls_) return tls_receive(parts);
  const ssize_t n = readv(fd_.get(), parts.data(), static_cast<int>(parts.size()));
  if (n == 0) return fail(State::kClosed, kClosedWords);
  return n < 0 ? blocked_or_failed(errno) : Result{State::kMoved, static_cast<std::size_t>(n)};
}

Stream::Result Stream::tls_send(std::span<const iovec> parts) {
  SSL* ssl = tls_->ssl.get();
  if (tls_->owes()) {
    tls_->flush();
    if (tls_->owes()) return {State::kBlocked};
  }
  if (tls_->send_error != 0) return fail(State::kFailed, words_of(tls_->send_error));
  std::size_t taken = 0;
  const auto write = [&](const void* data, std::size_t size) {
    if (size == 0) return;
    ERR_clear_error();
    std::size_t written = 0;
    // The BIO takes all its bytes: all or an error.
    if (SSL_write_ex(ssl, data, size, &written) == 1) {
      assert(written == size);
      taken += size;
    } else if (tls_->send_error == 0) {
      tls_->send_error = EPROTO;
    }
  };
  const auto may_go_on = [&] { return !tls_->owes() && tls_->send_error == 0; };
  std::size_t gathered = 0;
  for (const iovec& part : parts) {
    const auto* data = static_cast<const std::byte*>(part.iov_base);
    if (part.iov_len < kOwnRecordNbytes && gathered + part.iov_len <= tls_->gathered.size()) {
      std::memcpy(tls_->gathered.data() + gathered, data, part.iov_len);
      gathered += part.iov_len;
      continue;
    }
    write(tls_->gathered.data(), std::exchange(gathered, 0));
    for (std::size_t at = 0; at < part.iov_len && may_go_on(); at += kRecordNbytes) {
      write(data + at, std::min(kRecordNbytes, part.iov_len - at));
    }
    if (!may_go_on()) break;
  }
  if (may_go_on()) write(tls_->gathered.data(), gathered);
  // The next call reports a failure midway: earlier bytes may have reached the peer.
  if (taken == 0 && tls_->send_error != 0) return fail(State::kFailed, words_of(tls_->send_error));
  return {State::kMoved, taken};
}

Stream::Result Stream::tls_receive(std::span<const iovec> parts) {
  if (tls_->result) return *tls_->result;
  std::size_t got = 0;
  for (const iovec& part : parts) {
    for (std::size_t at = 0; at < part.iov_len;) {
      std::size_t nbytes = 0;
      ERR_clear_error();
      const int returned = SSL_read_ex(tls_->ssl.get(), static_cast<std::byte*>(part.iov_base) + at,
                                       part.iov_len - at, &nbytes);
      if (returned != 1) {
        const Result ended = tls_failed(returned);
        return got != 0 ? Result{State::kMoved, got} : ended;
      }
      at += nbytes;
      got += nbytes;
    }
  }
  return {State::kMoved, got};
}

// After a failed OpenSSL call other than a write: it may only need a retry.
Stream::Result Stream::tls_failed(int returned) {
  SSL* ssl = tls_->ssl.get();
  const int error = SSL_get_error(ssl, returned);
  if (error == SSL_ERROR_WANT_READ) return {State::kBlocked};
  Result result{State::kFailed};
  if (error == SSL_ERROR_ZERO_RETURN || tls_->ended) {
    result = fail(State::kClosed, kClosedWords);
  } else if (tls_->receive_error != 0) {
    result = fail(State::kFailed, words_of(tls_->receive_error));
  } else if (const long verified = SSL_get_verify_result(ssl);
             ERR_GET_REASON(ERR_peek_error()) == SSL_R_CERTIFICATE_VERIFY_FAILED) {
    result = fail(State::kFailed,
                  std::string("certificate verify failed: ") + X509_verify_cert_error_string(verified));
  } else {
    result = fail(State::kFailed, "TLS: " + tls_words());
  }
  ERR_clear_error();
  tls_->result = result;
  return result;
}

}  // namespace kvpool
