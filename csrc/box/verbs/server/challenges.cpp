#include "box/verbs/server/challenges.h"

#include "box/protocol/proof.h"

namespace hbm::verbs {

uint32_t Challenges::give(bool token_required) {
  if (challenges_.size() == kMost) challenges_.erase(challenges_.begin());
  IssuedChallenge& ticket = challenges_[++last_];
  ticket.hello.nonce = smb::random_nonce();
  ticket.hello.token_required = token_required ? 1 : 0;
  ticket.until = std::chrono::steady_clock::now() + kLongest;
  return last_;
}

IssuedChallenge* Challenges::find(uint32_t number) {
  const auto ticket = challenges_.find(number);
  if (ticket == challenges_.end()) return nullptr;
  if (std::chrono::steady_clock::now() <= ticket->second.until) return &ticket->second;
  challenges_.erase(ticket);
  return nullptr;
}

}  // namespace hbm::verbs
