#include "communicator/shm/phased_operation.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace hbm::communicator::shm {
namespace {

int64_t nanoseconds(Clock::time_point time) {
  return std::chrono::nanoseconds(time.time_since_epoch()).count();
}

}  // namespace

progress::Progress PhasedOperation::poll() {
  if (shm_group_->all_here()) {
    check_pause_ = kFirstPeerCheck;
    if (began_ != 0) note_last_rank();
    return next_phase();
  }
  return meanwhile() ? progress::Progress::kActive : progress::Progress::kIdle;
}

void PhasedOperation::require_alive() {
  shm_group_->require_alive(missing(), *this, [this] { return shm_group_->all_here(); });
}

progress::Slept PhasedOperation::sleep(Clock::time_point until, bool polled) {
  const uint32_t ends = shm_group_->ends();
  if (std::exchange(ends_seen_, ends) != ends) require_alive();
  const Clock::time_point end = polled ? until : std::min(until, Clock::now() + check_pause_);
  const bool has_slept = check_pause_ != kFirstPeerCheck;  // for the same ranks
  if (shm_group_->sleep(end, ends, polled || has_slept)) return progress::Slept::kWoken;
  if (polled) return progress::Slept::kTimedOut;
  const bool woken = Clock::now() < end;  // most likely by a rank that has published
  if (!woken || shm_group_->failed()) require_alive();
  if (woken) return progress::Slept::kWoken;
  check_pause_ = std::min(2 * check_pause_, kPeerCheckPeriod);
  return progress::Slept::kTimedOut;
}

std::string PhasedOperation::describe() const {
  return communicator::describe(make_header(signature_, count_, 0, 0),
                                shm_group_->local_rank(shm_group_->self()).group_rank,
                                shm_group_->group());
}

Slot& PhasedOperation::open() {
  Slot& slot = shm_group_->next_slot();
  if (part_ == 0) {
    const bool noted = progress::times_noted.load(std::memory_order_relaxed);
    slot.began = began_ = noted ? nanoseconds(Clock::now()) : 0;
  }
  slot.header = PhaseHeader(signature_, count_, part_++);
  slot.chunk = 0;
  slot.rounds = 0;
  slot.zero_copy = 0;
  return slot;
}

// Called in the first phase, when all slots of the phase are published. A rank of another time
// namespace has another clock, so a time in the future counts as now.
void PhasedOperation::note_last_rank() {
  const int64_t own = std::exchange(began_, 0);
  int64_t latest = own;
  for (size_t i = 0; i < shm_group_->size(); ++i) {
    const int64_t theirs = shm_group_->slot(i).began;
    if (theirs <= latest) continue;
    latest = theirs;
    observed_.last_rank = shm_group_->local_rank(i).group_rank;
  }
  if (latest > own) observed_.waited_ns = std::min(latest, nanoseconds(Clock::now())) - own;
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
