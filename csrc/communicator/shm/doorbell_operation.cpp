#include "communicator/shm/doorbell_operation.h"

#include <algorithm>

namespace hbm::communicator::shm {

progress::Progress DoorbellOperation::poll() {
  seen_ = shm_group_->message_rings();
  const progress::Progress progress = advance();
  if (progress == progress::Progress::kIdle) {
    check_peers();
  } else {
    check_pause_ = kFirstPeerCheck;
  }
  return progress;
}

progress::Slept DoorbellOperation::sleep(Clock::time_point until, bool polled) {
  const bool has_slept = check_pause_ != kFirstPeerCheck;  // for the same ranks
  const bool rung =
      shm_group_->sleep_messages(std::min(until, check_due_), seen_, polled || has_slept);
  return rung ? progress::Slept::kWoken : progress::Slept::kTimedOut;
}

// Throws if a rank in missing() has died. Called in poll(), not in sleep(): the progress thread
// calls poll() of every operation, but sleep() of only one.
void DoorbellOperation::check_peers() {
  const Clock::time_point now = Clock::now();
  const uint32_t ends = shm_group_->ends();
  if (!shm_group_->failed() && now < check_due_ && ends == ends_seen_) return;
  // If the count of rings has changed, data that the dead rank sent before its death may have
  // arrived. The next poll() finds them, and checks again.
  bool has_rung = false;
  shm_group_->require_alive(missing(), *this,
                            [&] { return has_rung = shm_group_->message_rings() != seen_; });
  if (has_rung) return;
  ends_seen_ = ends;
  check_pause_ = std::min(2 * check_pause_, kPeerCheckPeriod);
  check_due_ = now + check_pause_;
}

}  // namespace hbm::communicator::shm
