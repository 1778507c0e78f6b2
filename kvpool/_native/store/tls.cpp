// Loads certificates, and configures OpenSSL for clients.
#include "store/tls.h"

#include <fcntl.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <new>
#include <utility>

#include "store/descriptor.h"

namespace kvpool {
namespace {

// OpenSSL receives up to this with one system call, instead of a header and a body per record.
constexpr std::size_t kReadAheadNbytes = 256 << 10;

void check_readable(const char* what, const std::string& path) {
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file) throw TlsError(path + ": " + what + " cannot be read: " + words_of(errno));
  // OpenSSL would wait for a pipe.
  if (!is_regular(file.get())) throw TlsError(path + ": " + what + " cannot be read: it is not a file");
}

[[noreturn]] void refuse(const char* what, const std::string& path) {
  throw TlsError(path + ": " + what + " cannot be used: " + tls_words());
}

// Distributions' files with all authorities.
constexpr std::array kSystemAuthorities = {
    "/etc/ssl/certs/ca-certificates.crt",                 // Debian, Ubuntu, Arch, Gentoo
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",  // Fedora, RHEL, Amazon Linux
    "/etc/pki/tls/certs/ca-bundle.crt",                   // their older releases
    "/etc/ssl/ca-bundle.pem",                             // SUSE
    "/etc/ssl/cert.pem",                                  // Alpine
};

bool is_readable(const char* path) { return access(path, R_OK) == 0; }

// Whether OpenSSL has its own place: by its variables, or its build (not if static).
bool has_default_authorities() {
  return std::getenv(X509_get_default_cert_file_env()) != nullptr ||
         std::getenv(X509_get_default_cert_dir_env()) != nullptr ||
         is_readable(X509_get_default_cert_file()) || is_readable(X509_get_default_cert_dir());
}

// The file that trust_system() reads, if it is one.
std::string system_file() {
  if (const char* named = std::getenv(X509_get_default_cert_file_env())) return named;
  return has_default_authorities() ? X509_get_default_cert_file() : system_authorities();
}

void trust_system(SSL_CTX* context) {
  if (has_default_authorities()) {
    if (SSL_CTX_set_default_verify_paths(context) != 1) {
      throw TlsError("the system's authorities cannot be read: " + tls_words());
    }
    return;
  }
  const std::string path = system_authorities();
  if (path.empty()) {
    throw TlsError(
        std::string(
            "this system has no file of authorities in a usual place: name one, ?ca=/path.pem, or set ") +
        X509_get_default_cert_file_env());
  }
  if (SSL_CTX_load_verify_file(context, path.c_str()) != 1) refuse("the file of authorities", path);
}

}  // namespace

std::string system_authorities() {
  for (const char* path : kSystemAuthorities) {
    if (is_readable(path)) return path;
  }
  return {};
}

std::string tls_words() {
  const unsigned long error = ERR_peek_error();
  const char* reason = ERR_reason_error_string(error);
  std::string words = reason != nullptr ? reason : "it breaks the protocol";
  ERR_clear_error();
  return words;
}

void TlsContext::Free::operator()(ssl_ctx_st* context) const { SSL_CTX_free(context); }
void TlsContext::FreeSession::operator()(ssl_st* ssl) const { SSL_free(ssl); }

TlsContext::TlsContext(const TlsFiles& files) {
  ERR_clear_error();
  context_.reset(SSL_CTX_new(TLS_client_method()));
  SSL_CTX* context = context_.get();
  if (context == nullptr) throw TlsError("OpenSSL offers no TLS: " + tls_words());
  SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION);
  SSL_CTX_set_options(context, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION);
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER, nullptr);
  SSL_CTX_set_read_ahead(context, 1);
  SSL_CTX_set_default_read_buffer_len(context, kReadAheadNbytes);
  if (files.ca.empty()) {
    trust_system(context);
  } else {
    check_readable("the file of authorities", files.ca);
    if (SSL_CTX_load_verify_file(context, files.ca.c_str()) != 1) {
      refuse("the file of authorities", files.ca);
    }
  }
  if (files.cert.empty()) return;
  // OpenSSL would prompt on the terminal.
  bool has_passphrase = false;
  SSL_CTX_set_default_passwd_cb_userdata(context, &has_passphrase);
  SSL_CTX_set_default_passwd_cb(context, [](char*, int, int, void* asked) {
    *static_cast<bool*>(asked) = true;
    return -1;
  });
  check_readable("the client certificate", files.cert);
  if (SSL_CTX_use_certificate_chain_file(context, files.cert.c_str()) != 1) {
    refuse("the client certificate", files.cert);
  }
  check_readable("the private key", files.key);
  // It compares them with a present certificate.
  if (SSL_CTX_use_PrivateKey_file(context, files.key.c_str(), SSL_FILETYPE_PEM) != 1) {
    if (has_passphrase)
      throw TlsError(files.key + ": the private key has a passphrase: store it without one");
    refuse("the private key", files.key);
  }
  SSL_CTX_set_default_passwd_cb(context, nullptr);
  SSL_CTX_set_default_passwd_cb_userdata(context, nullptr);
}

TlsSource::TlsSource(TlsFiles files)
    : files_(std::move(files)), stamp_(stamp()), context_(std::make_shared<const TlsContext>(files_)) {}

TlsSource::Stamp TlsSource::stamp() const {
  Stamp found{};
  const std::array paths = {files_.ca.empty() ? system_file() : files_.ca, files_.cert, files_.key};
  for (std::size_t i = 0; i < paths.size(); ++i) {
    struct stat one{};
    if (paths[i].empty() || stat(paths[i].c_str(), &one) != 0) continue;
    found[i] = {static_cast<std::int64_t>(one.st_dev), static_cast<std::int64_t>(one.st_ino),
                static_cast<std::int64_t>(one.st_size), one.st_ctim.tv_sec, one.st_ctim.tv_nsec};
  }
  return found;
}

std::shared_ptr<const TlsContext> TlsSource::context() {
  const Stamp present = stamp();  // before the files are read: a later change shows
  std::unique_lock lock(mutex_);
  if (present == stamp_) return context_;
  lock.unlock();
  try {
    auto fresh = std::make_shared<const TlsContext>(files_);
    lock.lock();
    stamp_ = present;
    context_ = std::move(fresh);
  } catch (const TlsError&) {  // a replacement under way: the next dial reads them again
    lock.lock();
  }
  return context_;
}

TlsContext::Session TlsContext::session(const std::string& host) const {
  ERR_clear_error();
  Session session(SSL_new(context_.get()));
  if (!session) throw std::bad_alloc();
  X509_VERIFY_PARAM* wanted = SSL_get0_param(session.get());
  // As browsers and Python: the name must be an alternative name, and *.x stands for one whole label.
  X509_VERIFY_PARAM_set_hostflags(wanted,
                                  X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS | X509_CHECK_FLAG_NEVER_CHECK_SUBJECT);
  if (X509_VERIFY_PARAM_set1_ip_asc(wanted, host.c_str()) != 1) {
    ERR_clear_error();
    if (SSL_set1_host(session.get(), host.c_str()) != 1 ||
        SSL_set_tlsext_host_name(session.get(), host.c_str()) != 1) {
      throw std::bad_alloc();
    }
  }
  SSL_set_connect_state(session.get());
  return session;
}

}  // namespace kvpool
