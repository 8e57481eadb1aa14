#include "box/verbs/common/handshake.h"

#include <algorithm>

#include "box/protocol/proof.h"

namespace hbm::verbs {
namespace {

constexpr uint32_t kQueuePair = 1u << 31;  // a flag that no Join of a stream has

smb::Join join_of(const CallMessage& call) {
  smb::Join join{};
  std::ranges::copy(call.nonce, join.nonce.begin());
  join.session = call.session;
  join.flags = kQueuePair | uint32_t{call.lane} << 23 | uint32_t{call.lanes} << 16 | call.flags;
  join.pid = call.ticket;
  return join;
}

// All of `proof` that a call has room for, and zeros.
smb::Proof cut(const smb::Proof& proof) {
  smb::Proof shorter{};
  std::copy_n(proof.begin(), std::tuple_size_v<decltype(CallMessage::proof)>, shorter.begin());
  return shorter;
}

}  // namespace

void prove(CallMessage& call, std::string_view token, const smb::Hello& hello) {
  const smb::Proof proof = smb::client_proof(token, hello, join_of(call));
  std::copy_n(proof.begin(), call.proof.size(), call.proof.begin());
}

bool proves(const CallMessage& call, std::string_view token, const smb::Hello& hello) {
  smb::Proof given{};
  std::ranges::copy(call.proof, given.begin());
  return smb::equal(given, cut(smb::client_proof(token, hello, join_of(call))));
}

smb::Proof welcome_proof(const CallMessage& call, std::string_view token, const smb::Hello& hello) {
  smb::Joined joined{};
  joined.session = call.session;
  return smb::server_proof(token, hello, join_of(call), joined);
}

std::optional<smb::SealKeys> seal_keys(const CallMessage& call, std::string_view token,
                                       const smb::Hello& hello) {
  if ((call.flags & smb::Join::kSealed) == 0) return std::nullopt;
  return smb::seal_keys(token, hello, join_of(call));
}

RefusalMessage refusal(smb::Status status, std::string_view cause) {
  RefusalMessage refusal{RefusalMessage::kMagic, status, {}};
  const size_t most = sizeof(refusal.cause) - 1;
  smb::whole_characters(cause, most).copy(refusal.cause, most);
  return refusal;
}

std::string cause_of(const RefusalMessage& refusal) {
  return {refusal.cause, strnlen(refusal.cause, sizeof(refusal.cause))};
}

}  // namespace hbm::verbs
