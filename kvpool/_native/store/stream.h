// A connected socket that never blocks, in plain or under TLS. One thread uses it.
//
// Under TLS the socket takes whole records only: of one that it took a part of, the rest is kept here and
// goes first when there is room. So bytes that send() took are on their way for good, as in a socket's own
// buffer, and OpenSSL never has to be given the same bytes twice.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "store/descriptor.h"
#include "store/tls.h"

namespace kvpool {

class Stream {
 public:
  enum class State : std::uint8_t {
    kMoved,    // nbytes of the parts, from the front; the handshake: it is over
    kBlocked,  // nothing now: poll for events()
    kClosed,   // the other side ended the connection
    kFailed,   // the connection is of no use any more
  };
  struct Result {
    State state;
    std::size_t nbytes = 0;
  };

  Stream();                        // none
  explicit Stream(Descriptor fd);  // in plain
  // Under TLS, as a client: handshake() comes first. `host`: whose certificate is accepted.
  Stream(Descriptor fd, const TlsContext& tls, const std::string& host);
  Stream(Stream&& other) noexcept;
  Stream& operator=(Stream&& other) noexcept;
  ~Stream();

  // None of these blocks. The first goes on with the handshake, until it says kMoved; in plain there is none.
  Result handshake();
  // No parts: only what is owed() is sent. kMoved may be 0 bytes then.
  Result send(std::span<const iovec> parts);
  Result receive(std::span<const iovec> parts);

  // Bytes that send() took and the socket did not yet: call send() when it is writable.
  bool owes() const;
  // There may be more to receive that poll() does not show.
  bool has_pending() const;
  // What to poll for, `sends`: with something to send.
  short events(bool sends) const;

  int fd() const { return fd_.get(); }
  explicit operator bool() const { return static_cast<bool>(fd_); }
  // After kClosed or kFailed: why, in a few words without secrets.
  const std::string& error() const { return error_; }
  void reset();

 private:
  struct Tls;

  Result blocked_or_failed(int error_number);
  Result fail(State state, std::string words);
  Result tls_failed(int returned);
  Result tls_send(std::span<const iovec> parts);
  Result tls_receive(std::span<const iovec> parts);

  Descriptor fd_;
  std::unique_ptr<Tls> tls_;
  std::string error_;
};

}  // namespace kvpool
