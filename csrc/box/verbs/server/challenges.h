// Challenges that were given out and not met yet: so many, for so long; the oldest goes first.
//
// A ticket is good for every lane of one client, each lane once.
//
// Threads: one at a time.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>

#include "box/protocol/protocol.h"

namespace hbm::verbs {

class Peer;

struct IssuedChallenge {
  smb::Hello hello{};
  std::chrono::steady_clock::time_point until{};
  std::weak_ptr<Peer> peer;  // from its lane 0 on
  uint32_t lanes_let_in = 0;
};

class Challenges {
 public:
  static constexpr size_t kMost = 512;
  static constexpr std::chrono::seconds kLongest{5};

  // A new one, with a fresh nonce; its number.
  uint32_t give(bool token_required);

  const smb::Hello& hello(uint32_t number) const { return challenges_.at(number).hello; }

  // Null: it does not exist, or not any more.
  IssuedChallenge* find(uint32_t number);
  void end(uint32_t number) { challenges_.erase(number); }

 private:
  uint32_t last_ = 0;
  std::map<uint32_t, IssuedChallenge> challenges_;  // the oldest first, until the numbers wrap
};

}  // namespace hbm::verbs
