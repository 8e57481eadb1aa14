#include "communicator/shm/phased_operation.h"

namespace hbm::communicator::shm {

progress::Progress PhasedOperation::poll() {
  if (shm_group_->all_here()) return next_phase();
  return meanwhile() ? progress::Progress::kActive : progress::Progress::kIdle;
}

progress::Slept PhasedOperation::sleep(Clock::time_point until, bool polled) {
  if (shm_group_->sleep(until, polled)) return progress::Slept::kWoken;
  if (polled) return progress::Slept::kTimedOut;
  const bool woken = Clock::now() < until;  // most likely by a rank that has published
  if (!woken || shm_group_->failed()) {
    shm_group_->require_alive(missing(), *this, [this] { return shm_group_->all_here(); });
  }
  return woken ? progress::Slept::kWoken : progress::Slept::kTimedOut;
}

std::string PhasedOperation::describe() const {
  return communicator::describe(make_header(signature_, count_, 0, 0),
                                shm_group_->local_rank(shm_group_->self()).group_rank,
                                shm_group_->group());
}

Slot& PhasedOperation::open() {
  Slot& slot = shm_group_->next_slot();
  slot.header = PhaseHeader(signature_, count_, part_++);
  slot.chunk = 0;
  slot.rounds = 0;
  slot.zero_copy = 0;
  return slot;
}

void PhasedOperation::check(bool same_count) const {
  const PhaseHeader& own = shm_group_->slot(shm_group_->self()).header;
  for (size_t i = 0; i < shm_group_->size(); ++i) {
    const PhaseHeader& found = shm_group_->slot(i).header;
    PhaseHeader alike = found;
    if (!same_count) alike.count = own.count;
    if (alike == own) continue;
    check_header(found.message(), own.message(), shm_group_->local_rank(i).group_rank,
                 shm_group_->group());
  }
}

void PhasedOperation::check_transfer(size_t index, size_t found, size_t expected) const {
  if (found == expected) return;
  MessageHeader theirs = make_header(signature_, found, 0, 0);
  check_header(theirs, make_header(signature_, expected, 0, 0),
               shm_group_->local_rank(index).group_rank, shm_group_->group());
}

}  // namespace hbm::communicator::shm
