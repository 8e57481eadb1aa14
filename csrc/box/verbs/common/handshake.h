// The handshake that admits a queue pair, in the private data of the connection manager.
//
//   client  request  CallMessage without a queue pair
//   box     reject   ChallengeMessage: a nonce, and the id of the challenge
//   client  request  CallMessage with that id, once for each queue pair, number 0 first
//   box     accept   WelcomeMessage, or reject with a RefusalMessage
//
// A CallMessage is a Join (box/protocol/protocol.h) shortened to the 56 bytes that fit. Its proof
// is computed as for a TCP connection, with the nonce of the challenge, and cut to 128 bits. So the
// box creates a queue pair only after its client has proved the token, and a recorded proof is
// worthless.
//
// Threads: any.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

#include "box/protocol/authenticator.h"
#include "box/protocol/protocol.h"

namespace hbm::box::verbs::common {

struct CallMessage {
  static constexpr uint32_t kMagic = 0x31515053;  // "SPQ1"

  uint32_t magic;
  uint32_t challenge_id;
  protocol::Id session;
  std::array<std::byte, 12> nonce;
  std::array<std::byte, 16> proof;
  uint16_t flags;  // of protocol::Join
  uint8_t queue_pair;
  uint8_t queue_pairs;  // 0: a first call; only `magic` is set then
};
static_assert(sizeof(CallMessage) == 56);

struct ChallengeMessage {
  static constexpr uint32_t kMagic = 0x32515053;  // "SPQ2"

  uint32_t magic;
  uint32_t challenge_id;
  protocol::Hello hello;
};
static_assert(sizeof(ChallengeMessage) == 48);

struct RefusalMessage {
  static constexpr uint32_t kMagic = 0x33515053;  // "SPQ3"

  uint32_t magic;
  protocol::Status status;  // never kOk
  char cause[138];          // null-terminated
};
static_assert(sizeof(RefusalMessage) == 144);  // 148 bytes fit

struct WelcomeMessage {
  static constexpr uint32_t kMagic = 0x34515053;  // "SPQ4"

  uint32_t magic;
  uint32_t reserved;
  protocol::Proof proof;  // proves that the box knows the token
};

// Sets the proof of `call`.
void prove(CallMessage& call, std::string_view token, const protocol::Hello& hello);

// Returns true if the proof of `call` is right. Takes constant time.
bool proves(const CallMessage& call, std::string_view token, const protocol::Hello& hello);

// Returns the proof that the client of `call` expects in its WelcomeMessage.
protocol::Proof welcome_proof(const CallMessage& call, std::string_view token,
                              const protocol::Hello& hello);

// Derives the keys for messages on the queue pair of `call`; none without authentication.
std::optional<protocol::MacKeys> mac_keys(const CallMessage& call, std::string_view token,
                                          const protocol::Hello& hello);

RefusalMessage refusal(protocol::Status status, std::string_view cause);

// Returns the text of a refusal, even if it is not null-terminated.
std::string cause_of(const RefusalMessage& refusal);

// Returns the struct at the beginning of private data, or none if the data are too short or have
// another magic. The connection manager pads private data with zeros.
template <class T>
std::optional<T> decode(const void* data, size_t bytes) {
  T value;
  if (data == nullptr || bytes < sizeof(value)) return std::nullopt;
  std::memcpy(&value, data, sizeof(value));
  if (value.magic != T::kMagic) return std::nullopt;
  return value;
}

}  // namespace hbm::box::verbs::common
