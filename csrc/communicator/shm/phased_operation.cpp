#include "communicator/shm/phased_operation.h"

#include <cstring>

namespace hbm::node {

Progress Step::poll() { return team_->all_here() ? step() : Progress::kIdle; }

bool Step::doze(Clock::time_point until) {
  team_->sleep(until);
  const bool woken = Clock::now() < until;  // by one of those who have come, most likely
  if (!team_->all_here() && (!woken || team_->failed())) {
    team_->require_alive(missing(), *this, [this] { return team_->all_here(); });
  }
  return true;
}

std::string Step::describe() const {
  return hbm::describe(make_header(signature_, count_, 0, 0)) + " on rank " +
         std::to_string(team_->member(team_->self()).rank) + " of " + team_->group();
}

Slot& Step::open() {
  Slot& slot = team_->next_slot();
  slot.header = make_header(signature_, count_, part_++, 0);
  slot.chunk = 0;
  slot.rounds = 0;
  slot.direct = 0;
  return slot;
}

void Step::check(bool same_count) const {
  const MessageHeader& own = team_->slot(team_->self()).header;
  for (size_t i = 0; i < team_->size(); ++i) {
    const MessageHeader& found = team_->slot(i).header;
    MessageHeader alike = found;
    alike.count = own.count;
    if (!same_count && std::memcmp(&alike, &own, sizeof own) == 0) continue;
    check_header(found, own, team_->member(i).rank, team_->group());
  }
}

void Step::check_stream(size_t index, size_t found, size_t expected) const {
  if (found == expected) return;
  MessageHeader theirs = make_header(signature_, found, 0, 0);
  check_header(theirs, make_header(signature_, expected, 0, 0), team_->member(index).rank,
               team_->group());
}

}  // namespace hbm::node
