// The other end of a stream: a TLS server on a socket pair, moved by the test in its own thread. What it says
// passes through the test, which may harm it.
#pragma once

#include <openssl/ssl.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "store/descriptor.h"
#include "store/stream.h"

namespace kvpool::test {

// A certificate that signs itself, for the name "server" and for 127.0.0.1, in files that go with it.
class Certificate {
 public:
  Certificate();
  ~Certificate();
  const std::string& cert() const { return cert_; }
  const std::string& key() const { return key_; }

 private:
  std::string folder_, cert_, key_;
};

class TlsPeer {
 public:
  struct Options {
    std::string host = "server";
    bool demands_certificate = false;
    int version = TLS1_3_VERSION;
    int socket_nbytes = 0;  // of the sockets' buffers; 0: the system's
  };
  TlsPeer(const TlsContext& tls, const Certificate& certificate, const Options& options);
  TlsPeer(const TlsContext& tls, const Certificate& certificate) : TlsPeer(tls, certificate, Options{}) {}

  Stream stream;  // the client's end
  // What is done to ciphertext on its way to the client.
  std::function<void(std::string&)> harm;

  // Moves ciphertext both ways as far as the sockets go; false: nothing moved.
  bool pump();
  // Moves ciphertext to the client only.
  bool send_only();
  // Until both sides are done, or one has failed: the client's result.
  Stream::Result shake_hands();
  void say(const std::string& text);  // encrypts it; pump() sends it
  std::string heard();                // what the client said so far, since the last call
  void say_goodbye() { SSL_shutdown(ssl_.get()); }
  void ask_for_new_keys();
  void hang_up() { fd_.reset(); }

 private:
  struct Free {
    void operator()(SSL* ssl) const { SSL_free(ssl); }
    void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
  };
  Descriptor fd_;
  std::unique_ptr<SSL_CTX, Free> context_;
  std::unique_ptr<SSL, Free> ssl_;
  std::string waiting_;  // ciphertext for the client
};

}  // namespace kvpool::test
