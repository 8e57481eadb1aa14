// The handshake by which a queue pair is let in, carried as private data of the connection manager.
//
//   client  request  CallMessage for no lane
//   box     reject   ChallengeMessage: a nonce, and the ticket that it is kept under
//   client  request  CallMessage with that ticket, once for each lane; lane 0 first
//   box     accept   WelcomeMessage, or reject with a RefusalMessage
//
// A CallMessage is a Join (box/protocol/protocol.h), cut to the 56 bytes that fit; its proof is the
// one that a TCP connection with the challenge's nonce would need, cut to 128 bits. So no queue
// pair exists at the box before the token is proved for it, and one that was overheard proves
// nothing again.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

#include "box/protocol/protocol.h"
#include "box/protocol/seal.h"

namespace hbm::verbs {

struct CallMessage {
  static constexpr uint32_t kMagic = 0x31515053;  // "SPQ1"

  uint32_t magic;
  uint32_t ticket;
  smb::Id session;
  std::array<std::byte, 12> nonce;
  std::array<std::byte, 16> proof;
  uint16_t flags;  // of smb::Join
  uint8_t lane;
  uint8_t lanes;  // 0: a first call, all else is zero too
};
static_assert(sizeof(CallMessage) == 56);

struct ChallengeMessage {
  static constexpr uint32_t kMagic = 0x32515053;  // "SPQ2"

  uint32_t magic;
  uint32_t ticket;
  smb::Hello hello;
};
static_assert(sizeof(ChallengeMessage) == 48);

struct RefusalMessage {
  static constexpr uint32_t kMagic = 0x33515053;  // "SPQ3"

  uint32_t magic;
  smb::Status status;  // never kOk
  char cause[138];     // ends with a zero
};
static_assert(sizeof(RefusalMessage) == 144);  // of 148

struct WelcomeMessage {
  static constexpr uint32_t kMagic = 0x34515053;  // "SPQ4"

  uint32_t magic;
  uint32_t reserved;
  smb::Proof proof;  // that the box knows the token too
};

// Sets the proof.
void prove(CallMessage& call, std::string_view token, const smb::Hello& hello);

// Whether it is right, in a time that does not depend on where it is wrong.
bool proves(const CallMessage& call, std::string_view token, const smb::Hello& hello);

// Computes the proof that the client of `call` expects in its WelcomeMessage.
smb::Proof welcome_proof(const CallMessage& call, std::string_view token, const smb::Hello& hello);

// Derives the keys that the messages on the lane of `call` are sealed with; none if they are not.
std::optional<smb::SealKeys> seal_keys(const CallMessage& call, std::string_view token,
                                       const smb::Hello& hello);

RefusalMessage refusal(smb::Status status, std::string_view cause);

// The words of a refusal, whether they end with a zero or not.
std::string cause_of(const RefusalMessage& refusal);

// The struct that private data start with, if they are long enough and carry its magic; what the
// connection manager delivers is padded with zeros.
template <class T>
std::optional<T> decode(const void* data, size_t bytes) {
  T value;
  if (data == nullptr || bytes < sizeof(value)) return std::nullopt;
  std::memcpy(&value, data, sizeof(value));
  if (value.magic != T::kMagic) return std::nullopt;
  return value;
}

}  // namespace hbm::verbs
