#include "box/verbs/server/challenges.h"

#include "box/protocol/proof.h"
#include "box/server/request_handler.h"
#include "box/verbs/common/tuning.h"

namespace hbm::box::verbs::server {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

common::ChallengeMessage Challenges::issue() {
  if (challenges_.size() == common::kMostChallenges) challenges_.erase(challenges_.begin());
  IssuedChallenge& challenge = challenges_[++last_];
  challenge = {};
  challenge.hello.nonce = protocol::random_nonce();
  challenge.hello.token_required = token_.empty() ? 0 : 1;
  challenge.hello.authenticated = authenticates_ ? challenge.hello.token_required : 0;
  challenge.until = Clock::now() + common::kChallengeTimeout;
  return {common::ChallengeMessage::kMagic, last_, challenge.hello};
}

IssuedChallenge& Challenges::met_by(const common::CallMessage& call) {
  IssuedChallenge* const challenge = find(call.challenge_id);
  if (challenge == nullptr) {
    throw box::server::Refusal(
        protocol::Status::kDenied,
        "its challenge was met already, or was given out too long ago; try again");
  }
  if (!token_.empty() && !proves(call, token_, challenge->hello)) {
    challenges_.erase(call.challenge_id);
    throw box::server::Refusal(protocol::Status::kDenied, "the token is wrong");
  }
  const bool first = challenge->queue_pairs_admitted == 0;
  if (call.queue_pairs > max_queue_pairs_ || call.queue_pair != challenge->queue_pairs_admitted ||
      call.queue_pair >= call.queue_pairs ||
      (!first && call.queue_pairs != challenge->queue_pairs)) {
    throw box::server::Refusal(protocol::Status::kMalformed,
                               "queue pair " + std::to_string(call.queue_pair) + " of " +
                                   std::to_string(call.queue_pairs) +
                                   " is out of order, or exceeds the limit");
  }
  const bool authenticates = (call.flags & protocol::Join::kAuthenticated) != 0;
  if (authenticates != (challenge->hello.authenticated != 0)) {
    throw box::server::Refusal(protocol::Status::kUnsupported,
                               protocol::authentication_mismatch(authenticates));
  }
  return *challenge;
}

void Challenges::admitted(const common::CallMessage& call) {
  IssuedChallenge& challenge = challenges_.at(call.challenge_id);
  challenge.queue_pairs = call.queue_pairs;
  if (++challenge.queue_pairs_admitted == call.queue_pairs) challenges_.erase(call.challenge_id);
}

// Returns null if the challenge does not exist, or its time is over.
IssuedChallenge* Challenges::find(uint32_t challenge_id) {
  const auto challenge = challenges_.find(challenge_id);
  if (challenge == challenges_.end()) return nullptr;
  if (Clock::now() <= challenge->second.until) return &challenge->second;
  challenges_.erase(challenge);
  return nullptr;
}

}  // namespace hbm::box::verbs::server
