#include "box/protocol/proof.h"

#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/kdf.h>
#include <openssl/params.h>
#include <openssl/rand.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <string>

#include "box/protocol/openssl_error.h"

namespace hbm::box::protocol {
namespace {

static_assert(offsetof(Join, flags) == offsetof(Join, session) + sizeof(Id));
static_assert(offsetof(Join, pid) == offsetof(Join, flags) + sizeof(uint32_t));
static_assert(offsetof(Joined, generation) == offsetof(Joined, session) + sizeof(Id));
constexpr size_t kJoinClaims = sizeof(Id) + 2 * sizeof(uint32_t);
constexpr size_t kJoinedClaims = 2 * sizeof(Id);

void fill_with_random(void* to, size_t bytes) {
  if (RAND_bytes(static_cast<unsigned char*>(to), static_cast<int>(bytes)) != 1) {
    openssl_failed("make random bytes");
  }
}

void append(std::string& message, const void* data, size_t bytes) {
  message.append(static_cast<const char*>(data), bytes);
}

Proof authenticate(std::string_view token, const std::string& message) {
  Proof proof;
  unsigned int length = 0;
  if (HMAC(EVP_sha256(), token.data(), static_cast<int>(token.size()),
           reinterpret_cast<const unsigned char*>(message.data()), message.size(),
           reinterpret_cast<unsigned char*>(proof.data()), &length) == nullptr ||
      length != proof.size()) {
    openssl_failed("compute an HMAC-SHA-256");
  }
  return proof;
}

struct FreeKdf {
  void operator()(EVP_KDF* kdf) const noexcept { EVP_KDF_free(kdf); }
  void operator()(EVP_KDF_CTX* context) const noexcept { EVP_KDF_CTX_free(context); }
};

// HKDF (RFC 5869) with SHA-256.
MacKey derive(std::string_view token, std::string salt, std::string info) {
  const std::unique_ptr<EVP_KDF, FreeKdf> kdf(EVP_KDF_fetch(nullptr, "HKDF", nullptr));
  const std::unique_ptr<EVP_KDF_CTX, FreeKdf> context(EVP_KDF_CTX_new(kdf.get()));
  std::string secret(token);
  std::string digest = "SHA256";
  const OSSL_PARAM parameters[] = {
      OSSL_PARAM_construct_utf8_string(OSSL_KDF_PARAM_DIGEST, digest.data(), 0),
      OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_KEY, secret.data(), secret.size()),
      OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_SALT, salt.data(), salt.size()),
      OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_INFO, info.data(), info.size()),
      OSSL_PARAM_construct_end(),
  };
  MacKey key;
  if (!context || EVP_KDF_derive(context.get(), reinterpret_cast<unsigned char*>(key.data()),
                                 key.size(), parameters) != 1) {
    openssl_failed("derive a key by HKDF");
  }
  OPENSSL_cleanse(secret.data(), secret.size());
  return key;
}

}  // namespace

Nonce random_nonce() {
  Nonce nonce;
  fill_with_random(nonce.data(), nonce.size());
  return nonce;
}

Id random_id() {
  Id id;
  while (!id) fill_with_random(&id, sizeof(id));
  return id;
}

Id fingerprint(const Nonce& salt, const Id& id) {
  std::string message;
  append(message, salt.data(), salt.size());
  append(message, &id, sizeof(id));
  Proof digest;
  if (EVP_Digest(message.data(), message.size(), reinterpret_cast<unsigned char*>(digest.data()),
                 nullptr, EVP_sha256(), nullptr) != 1) {
    openssl_failed("compute a SHA-256");
  }
  static_assert(sizeof(Id) <= sizeof(Proof));
  Id print;
  std::memcpy(&print, digest.data(), sizeof(print));
  return print;
}

Proof client_proof(std::string_view token, const Hello& hello, const Join& join) {
  if (token.empty()) return {};
  std::string message = "hbm box client";
  append(message, hello.nonce.data(), hello.nonce.size());
  append(message, join.nonce.data(), join.nonce.size());
  append(message, reinterpret_cast<const std::byte*>(&join) + offsetof(Join, session), kJoinClaims);
  return authenticate(token, message);
}

Proof server_proof(std::string_view token, const Hello& hello, const Join& join,
                   const Joined& joined) {
  if (token.empty()) return {};
  std::string message = "hbm box server";
  append(message, join.nonce.data(), join.nonce.size());
  append(message, hello.nonce.data(), hello.nonce.size());
  append(message, reinterpret_cast<const std::byte*>(&joined) + offsetof(Joined, session),
         kJoinedClaims);
  return authenticate(token, message);
}

MacKeys mac_keys(std::string_view token, const Hello& hello, const Join& join) {
  std::string nonces;
  append(nonces, hello.nonce.data(), hello.nonce.size());
  append(nonces, join.nonce.data(), join.nonce.size());
  return {derive(token, nonces, "hbm box seal: client to box"),
          derive(token, nonces, "hbm box seal: box to client")};
}

const char* authentication_mismatch(bool client) noexcept {
  return client ? "the client authenticates its connections, and the box does not: start the box "
                  "with seal, "
                  "or connect with seal=False (HBMCOMM_BOX_SEAL=0)"
                : "the box authenticates its connections, and the client does not: connect with "
                  "seal=True "
                  "(HBMCOMM_BOX_SEAL=1), or start the box with --no-seal";
}

bool equal(const Proof& left, const Proof& right) noexcept {
  return CRYPTO_memcmp(left.data(), right.data(), left.size()) == 0;
}

}  // namespace hbm::box::protocol
