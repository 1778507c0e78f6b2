// A connected non-blocking socket, in plain or under TLS. Single-threaded.
//
// Under TLS the socket takes whole records: the unsent rest of a record is kept here and goes first. So
// send() commits its bytes, as a socket's own buffer does, and OpenSSL never needs the same bytes twice.
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
    kMoved,    // nbytes of the parts, from the front; a finished handshake
    kBlocked,  // wait with poll() for events()
    kClosed,   // the peer ended the connection
    kFailed,   // the connection is useless
  };
  struct Result {
    State state;
    std::size_t nbytes = 0;
  };

  Stream();                        // none
  explicit Stream(Descriptor fd);  // in plain
  // Under TLS, as a client: call handshake() first. `host`: must match the certificate.
  Stream(Descriptor fd, const TlsContext& tls, const std::string& host);
  Stream(Stream&& other) noexcept;
  Stream& operator=(Stream&& other) noexcept;
  ~Stream();

  // None of these blocks. Call handshake() until kMoved; in plain it is a no-op.
  Result handshake();
  // No parts: sends only owed bytes. kMoved may then be 0 bytes.
  Result send(std::span<const iovec> parts);
  Result receive(std::span<const iovec> parts);

  // Bytes of send() that the socket has not taken: call send() when writable.
  bool owes() const;
  // More may be readable although poll() is silent.
  bool has_pending() const;
  // Events for poll(); `sends`: with something to send.
  short events(bool sends) const;

  int fd() const { return fd_.get(); }
  explicit operator bool() const { return static_cast<bool>(fd_); }
  // After kClosed or kFailed: the reason, in a few words without secrets.
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
