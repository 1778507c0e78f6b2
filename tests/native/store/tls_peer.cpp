// The other end of a TLS connection, in this process.
#include "store/tls_peer.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <sys/socket.h>

#include <cstdio>
#include <filesystem>
#include <vector>

#include "check.h"

namespace kvpool::test {
namespace {

constexpr long kLife_s = 3600;

void add_extension(X509* cert, int kind, const char* value) {
  X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, nullptr, kind, value);
  CHECK(extension != nullptr);
  CHECK(X509_add_ext(cert, extension, -1) == 1);
  X509_EXTENSION_free(extension);
}

template <typename Write>
void write_file(const std::string& path, Write write) {
  std::FILE* file = std::fopen(path.c_str(), "w");
  CHECK(file != nullptr);
  CHECK(write(file) == 1);
  std::fclose(file);
}

}  // namespace

Certificate::Certificate() {
  std::string folder = (std::filesystem::temp_directory_path() / "kvpool-tls-XXXXXX").string();
  CHECK(mkdtemp(folder.data()) != nullptr);
  folder_ = folder;
  cert_ = folder + "/cert.pem";
  key_ = folder + "/key.pem";
  EVP_PKEY* key = EVP_EC_gen("P-256");
  X509* cert = X509_new();
  CHECK(key != nullptr && cert != nullptr);
  X509_set_version(cert, X509_VERSION_3);
  ASN1_INTEGER_set(X509_get_serialNumber(cert), 1);
  X509_gmtime_adj(X509_getm_notBefore(cert), -60);
  X509_gmtime_adj(X509_getm_notAfter(cert), kLife_s);
  X509_set_pubkey(cert, key);
  X509_NAME* name = X509_get_subject_name(cert);
  X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC, reinterpret_cast<const unsigned char*>("test"), -1, -1,
                             0);
  X509_set_issuer_name(cert, name);
  add_extension(cert, NID_subject_alt_name, "DNS:server,IP:127.0.0.1");
  CHECK(X509_sign(cert, key, EVP_sha256()) != 0);
  write_file(cert_, [&](std::FILE* file) { return PEM_write_X509(file, cert); });
  write_file(key_, [&](std::FILE* file) {
    return PEM_write_PrivateKey(file, key, nullptr, nullptr, 0, nullptr, nullptr);
  });
  X509_free(cert);
  EVP_PKEY_free(key);
}

Certificate::~Certificate() { std::filesystem::remove_all(folder_); }

TlsPeer::TlsPeer(const TlsContext& tls, const Certificate& certificate, const Options& options)
    : context_(SSL_CTX_new(TLS_server_method())) {
  SSL_CTX* context = context_.get();
  CHECK(SSL_CTX_use_certificate_file(context, certificate.cert().c_str(), SSL_FILETYPE_PEM) == 1);
  CHECK(SSL_CTX_use_PrivateKey_file(context, certificate.key().c_str(), SSL_FILETYPE_PEM) == 1);
  SSL_CTX_set_max_proto_version(context, options.version);
  if (options.demands_certificate) {
    CHECK(SSL_CTX_load_verify_file(context, certificate.cert().c_str()) == 1);
    SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  }
  int ends[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
  for (const int end : ends) {
    if (options.socket_nbytes == 0) break;
    CHECK(setsockopt(end, SOL_SOCKET, SO_SNDBUF, &options.socket_nbytes, sizeof(int)) == 0);
  }
  fd_ = Descriptor(ends[0]);
  stream = Stream(Descriptor(ends[1]), tls, options.host);
  ssl_.reset(SSL_new(context));
  SSL_set_bio(ssl_.get(), BIO_new(BIO_s_mem()), BIO_new(BIO_s_mem()));
  SSL_set_accept_state(ssl_.get());
}

bool TlsPeer::pump() {
  bool moved = false;
  char piece[65536];
  ssize_t n;
  while ((n = recv(fd_.get(), piece, sizeof piece, 0)) > 0) {
    CHECK(BIO_write(SSL_get_rbio(ssl_.get()), piece, static_cast<int>(n)) == n);
    moved = true;
  }
  if (SSL_in_init(ssl_.get())) SSL_do_handshake(ssl_.get());
  return send_only() || moved;
}

bool TlsPeer::send_only() {
  char piece[65536];
  int made;
  while ((made = BIO_read(SSL_get_wbio(ssl_.get()), piece, sizeof piece)) > 0) {
    std::string said(piece, static_cast<std::size_t>(made));
    if (harm) harm(said);
    waiting_ += said;
  }
  const ssize_t n = waiting_.empty() ? 0 : send(fd_.get(), waiting_.data(), waiting_.size(), MSG_NOSIGNAL);
  if (n > 0) waiting_.erase(0, static_cast<std::size_t>(n));
  return n > 0;
}

Stream::Result TlsPeer::shake_hands() {
  Stream::Result result{Stream::State::kBlocked};
  while (result.state == Stream::State::kBlocked) {
    result = stream.handshake();
    if (!pump() && result.state == Stream::State::kBlocked) break;
  }
  return result;
}

void TlsPeer::say(const std::string& text) {
  CHECK(SSL_write(ssl_.get(), text.data(), static_cast<int>(text.size())) == static_cast<int>(text.size()));
}

std::string TlsPeer::heard() {
  std::string all;
  char piece[16384];
  int n;
  while ((n = SSL_read(ssl_.get(), piece, sizeof piece)) > 0) all.append(piece, static_cast<std::size_t>(n));
  return all;
}

void TlsPeer::ask_for_new_keys() {
  CHECK(SSL_key_update(ssl_.get(), SSL_KEY_UPDATE_REQUESTED) == 1);
  CHECK(SSL_do_handshake(ssl_.get()) == 1);
}

}  // namespace kvpool::test
