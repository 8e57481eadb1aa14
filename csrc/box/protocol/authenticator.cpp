#include "box/protocol/authenticator.h"

#include <openssl/crypto.h>

#include <cstring>
#include <string>

#include "box/protocol/openssl_error.h"

namespace hbm::box::protocol {
namespace {

unsigned char* raw(std::byte* bytes) { return reinterpret_cast<unsigned char*>(bytes); }
const unsigned char* raw(const std::byte* bytes) {
  return reinterpret_cast<const unsigned char*>(bytes);
}

}  // namespace

Forged::Forged(const char* how)
    : Error(ErrorKind::kNetwork,
            std::string("what arrived is not what the other end sent: ") + how +
                "; somebody on the way altered, repeated, left out or reordered it") {}

Authenticator::Authenticator(const MacKey& key) : context_(EVP_CIPHER_CTX_new()) {
  if (!context_ || EVP_EncryptInit_ex(context_.get(), EVP_aes_256_gcm(), nullptr, raw(key.data()),
                                      nullptr) != 1) {
    openssl_failed("set up AES-256-GMAC");
  }
}

Tag Authenticator::next_tag(std::span<const std::byte> record) {
  std::array<unsigned char, 12> nonce{};
  std::memcpy(nonce.data(), &number_, sizeof(number_));
  ++number_;
  Tag tag;
  int length = 0;
  EVP_CIPHER_CTX* const context = context_.get();
  if (EVP_EncryptInit_ex(context, nullptr, nullptr, nullptr, nonce.data()) != 1 ||
      EVP_EncryptUpdate(context, nullptr, &length, raw(record.data()),
                        static_cast<int>(record.size())) != 1 ||
      EVP_EncryptFinal_ex(context, raw(tag.data()), &length) != 1 ||
      EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_GET_TAG, sizeof(tag), tag.data()) != 1) {
    openssl_failed("compute an AES-256-GMAC");
  }
  return tag;
}

std::span<const std::byte> Authenticator::verify(std::span<const std::byte> tagged) {
  if (tagged.size() < sizeof(Tag)) throw Forged("a record is shorter than its tag");
  const auto record = tagged.first(tagged.size() - sizeof(Tag));
  const Tag expected = next_tag(record);
  if (CRYPTO_memcmp(expected.data(), tagged.data() + record.size(), sizeof(Tag)) != 0) {
    throw Forged("a record does not have the tag of the next record");
  }
  return record;
}

}  // namespace hbm::box::protocol
