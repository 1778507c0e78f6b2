// Block hashes: the canonical CBOR of a block, and the chain of hashes over it.
#include "key/hashing.h"

#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <memory>
#include <stdexcept>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvpool {
namespace {

static_assert(std::endian::native == std::endian::little, "wire formats are written as they lie in memory");

struct Free {
  void operator()(EVP_MD* md) const { EVP_MD_free(md); }
  void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
};

// Fetched once: a fetch per block doubles the time of the chain.
const EVP_MD* sha256() {
  static const std::unique_ptr<EVP_MD, Free> md(EVP_MD_fetch(nullptr, "SHA256", nullptr));
  if (!md) throw std::runtime_error("OpenSSL has no SHA256");
  return md.get();
}

class Hasher {
 public:
  explicit Hasher(HashAlgorithm algorithm) : algorithm_(algorithm) {
    if (algorithm_ != HashAlgorithm::kSha256Cbor) return;
    md_ = sha256();
    context_.reset(EVP_MD_CTX_new());
    if (!context_) throw std::bad_alloc();
  }

  void operator()(const void* data, std::size_t nbytes, std::byte* out) {
    if (algorithm_ == HashAlgorithm::kXxhashCbor) {
      XXH128_canonical_t canonical;
      XXH128_canonicalFromHash(&canonical, XXH3_128bits(data, nbytes));
      std::memcpy(out, canonical.digest, sizeof canonical.digest);
      return;
    }
    if (EVP_DigestInit_ex2(context_.get(), md_, nullptr) != 1 ||
        EVP_DigestUpdate(context_.get(), data, nbytes) != 1 ||
        EVP_DigestFinal_ex(context_.get(), reinterpret_cast<unsigned char*>(out), nullptr) != 1) {
      throw std::runtime_error("OpenSSL failed to compute SHA256");
    }
  }

 private:
  HashAlgorithm algorithm_;
  const EVP_MD* md_ = nullptr;
  std::unique_ptr<EVP_MD_CTX, Free> context_;
};

// CBOR major types (RFC 8949, section 3.1), shifted into place.
constexpr std::uint8_t kUnsigned = 0x00;
constexpr std::uint8_t kByteString = 0x40;
constexpr std::uint8_t kArray = 0x80;
constexpr std::uint8_t kNull = 0xf6;
constexpr std::size_t kMaxHeadNbytes = 9;

template <typename Word>
std::uint8_t* write_big_endian(std::uint8_t* out, Word value) {
  for (std::size_t shift = sizeof(Word) * 8; shift != 0;) {
    shift -= 8;
    *out++ = static_cast<std::uint8_t>(value >> shift);
  }
  return out;
}

// The shortest head for `value`, as canonical CBOR requires. `out` has room for kMaxHeadNbytes.
inline std::uint8_t* write_head(std::uint8_t* out, std::uint8_t major, std::uint64_t value) {
  if (value < 24) {
    *out++ = static_cast<std::uint8_t>(major | value);
    return out;
  }
  if (value <= 0xff) {
    *out++ = major | 24;
    *out++ = static_cast<std::uint8_t>(value);
    return out;
  }
  if (value <= 0xffff) {
    *out++ = major | 25;
    return write_big_endian(out, static_cast<std::uint16_t>(value));
  }
  if (value <= 0xffffffff) {
    *out++ = major | 26;
    return write_big_endian(out, static_cast<std::uint32_t>(value));
  }
  *out++ = major | 27;
  return write_big_endian(out, value);
}

}  // namespace

HashAlgorithm parse_algorithm(std::string_view name) {
  if (name == "sha256_cbor") return HashAlgorithm::kSha256Cbor;
  if (name == "xxhash_cbor") return HashAlgorithm::kXxhashCbor;
  throw std::invalid_argument("unknown hash algorithm '" + std::string(name) +
                              "': expected sha256_cbor or xxhash_cbor");
}

std::size_t digest_nbytes(HashAlgorithm algorithm) {
  return algorithm == HashAlgorithm::kSha256Cbor ? 32 : 16;
}

std::vector<std::byte> hash_chain(HashAlgorithm algorithm, std::string_view parent,
                                  std::span<const std::uint64_t> token_ids, std::size_t block_tokens,
                                  const Extras& extras) {
  if (block_tokens == 0) throw std::invalid_argument("block_tokens must be at least 1");
  const std::size_t blocks = token_ids.size() / block_tokens;
  if (blocks == 0) return {};

  const std::size_t nbytes = digest_nbytes(algorithm);
  std::size_t max_extra_nbytes = 1;
  for (const auto& [index, extra] : extras) max_extra_nbytes = std::max(max_extra_nbytes, extra.size());
  std::vector<std::uint8_t> message(1 + kMaxHeadNbytes + std::max(parent.size(), kMaxDigestNbytes) +
                                    kMaxHeadNbytes * (1 + block_tokens) + max_extra_nbytes);
  std::vector<std::byte> digests(blocks * nbytes);
  Hasher hasher(algorithm);

  const void* previous = parent.data();
  std::size_t previous_nbytes = parent.size();
  auto extra = extras.begin();
  for (std::size_t block = 0; block < blocks; ++block) {
    std::uint8_t* out = message.data();
    *out++ = kArray | 3;
    out = write_head(out, kByteString, previous_nbytes);
    if (previous_nbytes != 0) std::memcpy(out, previous, previous_nbytes);
    out += previous_nbytes;
    out = write_head(out, kArray, block_tokens);
    for (const std::uint64_t token_id : token_ids.subspan(block * block_tokens, block_tokens)) {
      out = write_head(out, kUnsigned, token_id);
    }
    while (extra != extras.end() && extra->first < block) ++extra;
    if (extra != extras.end() && extra->first == block && !extra->second.empty()) {
      std::memcpy(out, extra->second.data(), extra->second.size());
      out += extra->second.size();
    } else {
      *out++ = kNull;
    }
    std::byte* digest_out = digests.data() + block * nbytes;
    hasher(message.data(), static_cast<std::size_t>(out - message.data()), digest_out);
    previous = digest_out;
    previous_nbytes = nbytes;
  }
  return digests;
}

std::vector<std::uint64_t> low_words(HashAlgorithm algorithm, std::span<const std::byte> digests) {
  const std::size_t nbytes = digest_nbytes(algorithm);
  std::vector<std::uint64_t> words(digests.size() / nbytes);
  for (std::size_t i = 0; i < words.size(); ++i) {
    std::uint64_t word;
    std::memcpy(&word, digests.data() + (i + 1) * nbytes - sizeof word, sizeof word);
    words[i] = __builtin_bswap64(word);
  }
  return words;
}

std::string digest(HashAlgorithm algorithm, std::span<const std::byte> data) {
  std::array<std::byte, kMaxDigestNbytes> out;
  Hasher hasher(algorithm);
  hasher(data.data(), data.size(), out.data());
  return std::string(reinterpret_cast<const char*>(out.data()), digest_nbytes(algorithm));
}

}  // namespace kvpool
