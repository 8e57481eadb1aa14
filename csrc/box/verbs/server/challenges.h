// The challenges that a box has issued to clients over RDMA, and what it asks of the calls that
// meet them (box/verbs/common/handshake.h); nothing of the device that brings the calls.
//
// A challenge is good for every lane of one client, each lane once, in order. So many are kept, for
// so long; the oldest goes first.
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

namespace hbm::verbs {

class Peer;

struct IssuedChallenge {
  smb::Hello hello{};
  std::chrono::steady_clock::time_point until{};
  std::weak_ptr<Peer> peer;  // from its lane 0 on
  uint32_t lanes = 0;        // that the call for lane 0 named
  uint32_t lanes_let_in = 0;
};

class Challenges {
 public:
  // `token`, `seal` and `max_lanes` as in VerbsListenerOptions.
  Challenges(std::string token, bool seal, uint32_t max_lanes)
      : token_(std::move(token)), seal_(seal), max_lanes_(max_lanes) {}

  // Issues one with a fresh nonce, in answer to a client's first call.
  ChallengeMessage issue();

  // Returns the challenge that a call meets, for the lane that comes next. Throws box::Refusal for
  // any other call; one with the wrong token ends the challenge that it names.
  IssuedChallenge& met_by(const CallMessage& call);

  // Takes down that the lane of such a call was let in. The last lane ends the challenge.
  void let_in(const CallMessage& call);

 private:
  IssuedChallenge* find(uint32_t ticket);

  const std::string token_;
  const bool seal_;
  const uint32_t max_lanes_;
  uint32_t last_ = 0;
  std::map<uint32_t, IssuedChallenge> challenges_;  // the oldest first, until the numbers wrap
};

}  // namespace hbm::verbs
