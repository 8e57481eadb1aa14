#include "box/protocol/proof.h"

#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <cstddef>
#include <cstring>
#include <string>

#include "base/error.h"

namespace hbm::smb {
namespace {

static_assert(offsetof(Join, flags) == offsetof(Join, session) + sizeof(Id));
static_assert(offsetof(Join, pid) == offsetof(Join, flags) + sizeof(uint32_t));
static_assert(offsetof(Joined, box) == offsetof(Joined, session) + sizeof(Id));
constexpr size_t kJoinClaims = sizeof(Id) + 2 * sizeof(uint32_t);
constexpr size_t kJoinedClaims = 2 * sizeof(Id);

[[noreturn]] void failed(const std::string& what) {
  char cause[256] = "it gives no cause";
  const unsigned long code = ERR_get_error();
  if (code != 0) ERR_error_string_n(code, cause, sizeof(cause));
  throw Error(ErrorKind::kUnavailable, "OpenSSL cannot " + what + ": " + cause);
}

void fill_with_random(void* to, size_t bytes) {
  if (RAND_bytes(static_cast<unsigned char*>(to), static_cast<int>(bytes)) != 1) {
    failed("make random bytes");
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
    failed("compute an HMAC-SHA-256");
  }
  return proof;
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
    failed("compute a SHA-256");
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

bool equal(const Proof& left, const Proof& right) noexcept {
  return CRYPTO_memcmp(left.data(), right.data(), left.size()) == 0;
}

}  // namespace hbm::smb
