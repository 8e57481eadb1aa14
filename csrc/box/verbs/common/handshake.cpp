#include "box/verbs/common/handshake.h"

#include <algorithm>

#include "box/protocol/proof.h"

namespace hbm::box::verbs::common {
namespace {

constexpr uint32_t kQueuePair = 1u << 31;  // set in no Join of a stream

protocol::Join join_of(const CallMessage& call) {
  protocol::Join join{};
  std::ranges::copy(call.nonce, join.nonce.begin());
  join.session = call.session;
  join.flags =
      kQueuePair | uint32_t{call.queue_pair} << 23 | uint32_t{call.queue_pairs} << 16 | call.flags;
  join.pid = call.challenge_id;
  return join;
}

// Returns the part of `proof` that fits into a call, padded with zeros.
protocol::Proof cut(const protocol::Proof& proof) {
  protocol::Proof shorter{};
  std::copy_n(proof.begin(), std::tuple_size_v<decltype(CallMessage::proof)>, shorter.begin());
  return shorter;
}

}  // namespace

void prove(CallMessage& call, std::string_view token, const protocol::Hello& hello) {
  const protocol::Proof proof = protocol::client_proof(token, hello, join_of(call));
  std::copy_n(proof.begin(), call.proof.size(), call.proof.begin());
}

bool proves(const CallMessage& call, std::string_view token, const protocol::Hello& hello) {
  protocol::Proof given{};
  std::ranges::copy(call.proof, given.begin());
  return protocol::equal(given, cut(protocol::client_proof(token, hello, join_of(call))));
}

protocol::Proof welcome_proof(const CallMessage& call, std::string_view token,
                              const protocol::Hello& hello) {
  protocol::Joined joined{};
  joined.session = call.session;
  return protocol::server_proof(token, hello, join_of(call), joined);
}

std::optional<protocol::MacKeys> mac_keys(const CallMessage& call, std::string_view token,
                                          const protocol::Hello& hello) {
  if ((call.flags & protocol::Join::kAuthenticated) == 0) return std::nullopt;
  return protocol::mac_keys(token, hello, join_of(call));
}

RefusalMessage refusal(protocol::Status status, std::string_view cause) {
  RefusalMessage refusal{RefusalMessage::kMagic, status, {}};
  const size_t most = sizeof(refusal.cause) - 1;
  protocol::whole_characters(cause, most).copy(refusal.cause, most);
  return refusal;
}

std::string cause_of(const RefusalMessage& refusal) {
  return {refusal.cause, strnlen(refusal.cause, sizeof(refusal.cause))};
}

}  // namespace hbm::box::verbs::common
