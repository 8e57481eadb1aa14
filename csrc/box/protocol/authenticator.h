// Authenticates, without encrypting, the records that one end of a connection sends after the join.
// Detects changed, replayed, dropped and reordered records.
//
// A record consists of a RecordHeader, content, and a Tag over the header and the content. The tag
// is AES-256-GMAC (NIST SP 800-38D) under a key for this direction of this connection. The nonce is
// the number of the record, from 0. Each end counts the records, and the number is not sent. So any
// record other than the next one has a wrong tag.
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

namespace hbm::box::protocol {

struct RecordHeader {
  uint32_t bytes;  // of content, without header and tag
};
static_assert(sizeof(RecordHeader) == 4);

using Tag = std::array<std::byte, 16>;
using MacKey = std::array<std::byte, 32>;

// The keys for both directions of a connection (proof.h derives them).
struct MacKeys {
  MacKey to_box;
  MacKey to_client;
};

// Thrown if a received record is not the next one that the peer sent.
class Forged : public Error {
 public:
  explicit Forged(const char* how);
};

class Authenticator {
 public:
  // Throws Error(kUnavailable) when OpenSSL fails, as do the members.
  explicit Authenticator(const MacKey& key);

  // Returns the tag of the next record. On a stream `record` includes the RecordHeader.
  Tag next_tag(std::span<const std::byte> record);

  // Checks the next record. Returns it without the tag at the end of `tagged`. Throws Forged if the
  // tag is wrong.
  std::span<const std::byte> verify(std::span<const std::byte> tagged);

 private:
  struct Free {
    void operator()(EVP_CIPHER_CTX* context) const noexcept { EVP_CIPHER_CTX_free(context); }
  };

  const std::unique_ptr<EVP_CIPHER_CTX, Free> context_;
  uint64_t number_ = 0;
};

}  // namespace hbm::box::protocol
