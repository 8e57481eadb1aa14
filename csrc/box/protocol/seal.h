// Seals what one end of a connection sends after the join, so that nobody on the way can alter,
// repeat, leave out or reorder any of it.
//
// The bytes travel in pieces: a PieceHeader, that many bytes, and a Tag over both. The tag is
// AES-256-GMAC (NIST SP 800-38D) under a key for this direction of this connection, with the number
// of the piece, counted from 0, as its nonce. The number is not sent: a piece that is not the next
// one has the wrong tag. Nothing is encrypted.
//
// Threads: one at a time.
#pragma once

#include <openssl/evp.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/error.h"
#include "box/protocol/tuning.h"

namespace hbm::smb {

struct PieceHeader {
  uint32_t bytes;  // that follow, without the tag
};
static_assert(sizeof(PieceHeader) == 4);

using Tag = std::array<std::byte, 16>;
using SealKey = std::array<std::byte, 32>;

// Both directions of a connection; proof.h derives them.
struct SealKeys {
  SealKey to_box;
  SealKey to_client;
};

// A piece is not the one that the other end sent next.
class Forged : public Error {
 public:
  explicit Forged(const char* how);
};

class Seal {
 public:
  // Throws Error(kUnavailable) when OpenSSL fails, as next() does.
  explicit Seal(const SealKey& key);

  // Computes the tag of the next piece; on a stream its header is the first part of it.
  Tag next(std::span<const std::byte> piece);

  // Returns the next piece, which `sealed` ends with the tag of. Throws Forged if it does not.
  std::span<const std::byte> open(std::span<const std::byte> sealed);

 private:
  struct Free {
    void operator()(EVP_CIPHER_CTX* context) const noexcept { EVP_CIPHER_CTX_free(context); }
  };

  const std::unique_ptr<EVP_CIPHER_CTX, Free> context_;
  uint64_t number_ = 0;
};

}  // namespace hbm::smb
