#include "box/verbs/server/challenges.h"

#include "box/protocol/proof.h"
#include "box/server/request_handler.h"
#include "box/verbs/common/tuning.h"

namespace hbm::verbs {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

ChallengeMessage Challenges::issue() {
  if (challenges_.size() == kMostChallenges) challenges_.erase(challenges_.begin());
  IssuedChallenge& challenge = challenges_[++last_];
  challenge = {};
  challenge.hello.nonce = smb::random_nonce();
  challenge.hello.token_required = token_.empty() ? 0 : 1;
  challenge.hello.sealed = seal_ ? challenge.hello.token_required : 0;
  challenge.until = Clock::now() + kChallengeTimeout;
  return {ChallengeMessage::kMagic, last_, challenge.hello};
}

IssuedChallenge& Challenges::met_by(const CallMessage& call) {
  IssuedChallenge* const challenge = find(call.ticket);
  if (challenge == nullptr) {
    throw box::Refusal(smb::Status::kDenied,
                       "its challenge was met already, or was given out too long ago; try again");
  }
  if (!token_.empty() && !proves(call, token_, challenge->hello)) {
    challenges_.erase(call.ticket);
    throw box::Refusal(smb::Status::kDenied, "the token is wrong");
  }
  const bool first = challenge->lanes_let_in == 0;
  if (call.lanes > max_lanes_ || call.lane != challenge->lanes_let_in || call.lane >= call.lanes ||
      (!first && call.lanes != challenge->lanes)) {
    throw box::Refusal(smb::Status::kMalformed, "queue pair " + std::to_string(call.lane) + " of " +
                                                    std::to_string(call.lanes) +
                                                    " does not come next, or is too many");
  }
  const bool seals = (call.flags & smb::Join::kSealed) != 0;
  if (seals != (challenge->hello.sealed != 0)) {
    throw box::Refusal(smb::Status::kUnsupported, smb::seal_mismatch(seals));
  }
  return *challenge;
}

void Challenges::let_in(const CallMessage& call) {
  IssuedChallenge& challenge = challenges_.at(call.ticket);
  challenge.lanes = call.lanes;
  if (++challenge.lanes_let_in == call.lanes) challenges_.erase(call.ticket);
}

// Null: it does not exist, or not any more.
IssuedChallenge* Challenges::find(uint32_t ticket) {
  const auto challenge = challenges_.find(ticket);
  if (challenge == challenges_.end()) return nullptr;
  if (Clock::now() <= challenge->second.until) return &challenge->second;
  challenges_.erase(challenge);
  return nullptr;
}

}  // namespace hbm::verbs
