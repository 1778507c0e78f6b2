// TLS settings shared by a store's connections: trusted authorities and the client's identity.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

struct ssl_ctx_st;
struct ssl_st;

namespace kvpool {

// Paths of PEM files.
struct TlsFiles {
  std::string ca;    // trusted authorities; empty: the system's
  std::string cert;  // the client's certificate and its chain; empty: none
  std::string key;   // its private key, without a passphrase
};

// An unusable file: what() names it and the reason in one line, without its contents.
struct TlsError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Shared by all threads.
class TlsContext {
 public:
  // Throws TlsError.
  explicit TlsContext(const TlsFiles& files);

  struct FreeSession {
    void operator()(ssl_st* ssl) const;
  };
  using Session = std::unique_ptr<ssl_st, FreeSession>;

  // A client's session that accepts only a certificate for `host` (a name or an IP address).
  Session session(const std::string& host) const;

 private:
  struct Free {
    void operator()(ssl_ctx_st* context) const;
  };
  std::unique_ptr<ssl_ctx_st, Free> context_;
};

// The context of files that may be replaced at any time. Any thread.
class TlsSource {
 public:
  // Throws TlsError.
  explicit TlsSource(TlsFiles files);
  // Of the files as they are now; of the former ones while these cannot be used. Blocks to read changed ones.
  std::shared_ptr<const TlsContext> context();

 private:
  // Device, inode, size and time of change of each file; zeros without it.
  using Stamp = std::array<std::array<std::int64_t, 5>, 3>;
  Stamp stamp() const;

  const TlsFiles files_;
  std::mutex mutex_;  // guards what follows
  Stamp stamp_;
  std::shared_ptr<const TlsContext> context_;
};

// The file of this Linux distribution's authorities; empty: in no usual place.
std::string system_authorities();

// OpenSSL's reason for the last failed call in this thread; empties the thread's error queue.
std::string tls_words();

}  // namespace kvpool
