// The challenges that a box has issued to clients over RDMA, and the checks of the calls that
// answer them (box/verbs/common/handshake.h). Does not depend on the device.
//
// A challenge admits the queue pairs of one client, each once, in order. At most kMostChallenges
// are stored, each for kChallengeTimeout; the oldest is dropped first.
//
// Threads: one at a time.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "box/protocol/protocol.h"
#include "box/verbs/common/handshake.h"

namespace hbm::box::verbs::server {

class Peer;

struct IssuedChallenge {
  protocol::Hello hello{};
  std::chrono::steady_clock::time_point until{};
  std::weak_ptr<Peer> peer;  // set once queue pair 0 is admitted
  uint32_t queue_pairs = 0;  // as the call for queue pair 0 states
  uint32_t queue_pairs_admitted = 0;
};

class Challenges {
 public:
  // `token`, `seal` and `max_queue_pairs` as in VerbsListenerOptions.
  Challenges(std::string token, bool seal, uint32_t max_queue_pairs)
      : token_(std::move(token)), authenticates_(seal), max_queue_pairs_(max_queue_pairs) {}

  // Issues a challenge with a fresh nonce, in reply to a client's first call.
  common::ChallengeMessage issue();

  // Returns the challenge that `call` answers with the right proof, for the next queue pair of its
  // client. Throws box::server::Refusal for any other call. A wrong proof ends the challenge.
  IssuedChallenge& met_by(const common::CallMessage& call);

  // Records that the queue pair of `call` was admitted. The last queue pair of the client ends the
  // challenge.
  void admitted(const common::CallMessage& call);

 private:
  IssuedChallenge* find(uint32_t challenge_id);

  const std::string token_;
  const bool authenticates_;
  const uint32_t max_queue_pairs_;
  uint32_t last_ = 0;
  std::map<uint32_t, IssuedChallenge> challenges_;  // the oldest first, until the ids wrap
};

}  // namespace hbm::box::verbs::server
