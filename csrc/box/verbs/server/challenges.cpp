#include "box/verbs/server/challenges.h"

#include "box/protocol/proof.h"

namespace hbm::verbs {

uint32_t Tickets::give(bool token_required) {
  if (tickets_.size() == kMost) tickets_.erase(tickets_.begin());
  Ticket& ticket = tickets_[++last_];
  ticket.hello.nonce = smb::random_nonce();
  ticket.hello.token_required = token_required ? 1 : 0;
  ticket.until = std::chrono::steady_clock::now() + kLongest;
  return last_;
}

Ticket* Tickets::find(uint32_t number) {
  const auto ticket = tickets_.find(number);
  if (ticket == tickets_.end()) return nullptr;
  if (std::chrono::steady_clock::now() <= ticket->second.until) return &ticket->second;
  tickets_.erase(ticket);
  return nullptr;
}

}  // namespace hbm::verbs
