// What the TLS connections of one store have in common: whom they trust, and how they prove who they are.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>

struct ssl_ctx_st;
struct ssl_st;

namespace kvpool {

// Paths of PEM files.
struct TlsFiles {
  std::string ca;    // authorities that are trusted; empty: the system's
  std::string cert;  // the client's certificate and its chain; empty: none is shown
  std::string key;   // its private key, without a passphrase
};

// A file that cannot be used: what() names it and says why in one line, and holds nothing of its contents.
class TlsError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Read once, then shared by all threads.
class TlsContext {
 public:
  // Throws TlsError.
  explicit TlsContext(const TlsFiles& files);

  struct FreeSession {
    void operator()(ssl_st* ssl) const;
  };
  using Session = std::unique_ptr<ssl_st, FreeSession>;

  // A client's session that accepts a certificate for `host` (a name or an IP address) only.
  Session session(const std::string& host) const;

 private:
  struct Free {
    void operator()(ssl_ctx_st* context) const;
  };
  std::unique_ptr<ssl_ctx_st, Free> context_;
};

// The file of all authorities that this Linux distribution trusts; empty: in none of the usual places.
std::string system_authorities();

// Why OpenSSL's last call in this thread failed, in its own words; empties the thread's queue of errors.
std::string tls_words();

}  // namespace kvpool
