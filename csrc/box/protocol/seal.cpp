#include "box/protocol/seal.h"

#include <openssl/crypto.h>

#include <cstring>
#include <string>

#include "box/protocol/openssl_error.h"

namespace hbm::smb {
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

Seal::Seal(const SealKey& key) : context_(EVP_CIPHER_CTX_new()) {
  if (!context_ || EVP_EncryptInit_ex(context_.get(), EVP_aes_256_gcm(), nullptr, raw(key.data()),
                                      nullptr) != 1) {
    openssl_failed("set up AES-256-GMAC");
  }
}

Tag Seal::next(std::span<const std::byte> piece) {
  std::array<unsigned char, 12> nonce{};
  std::memcpy(nonce.data(), &number_, sizeof(number_));
  ++number_;
  Tag tag;
  int length = 0;
  EVP_CIPHER_CTX* const context = context_.get();
  if (EVP_EncryptInit_ex(context, nullptr, nullptr, nullptr, nonce.data()) != 1 ||
      EVP_EncryptUpdate(context, nullptr, &length, raw(piece.data()),
                        static_cast<int>(piece.size())) != 1 ||
      EVP_EncryptFinal_ex(context, raw(tag.data()), &length) != 1 ||
      EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_GET_TAG, sizeof(tag), tag.data()) != 1) {
    openssl_failed("compute an AES-256-GMAC");
  }
  return tag;
}

std::span<const std::byte> Seal::open(std::span<const std::byte> sealed) {
  if (sealed.size() < sizeof(Tag)) throw Forged("a piece is shorter than its tag");
  const auto piece = sealed.first(sealed.size() - sizeof(Tag));
  const Tag expected = next(piece);
  if (CRYPTO_memcmp(expected.data(), sealed.data() + piece.size(), sizeof(Tag)) != 0) {
    throw Forged("a piece has not the tag of the one that comes next");
  }
  return piece;
}

}  // namespace hbm::smb
