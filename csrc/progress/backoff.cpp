#include "progress/backoff.h"

#include <sched.h>

#include <algorithm>
#include <thread>

#include "base/waiting.h"
#include "progress/tuning.h"

namespace hbm::progress {
namespace {

using std::chrono::microseconds;

// Yields the processor. Returns false immediately if a thread that yields would not run again soon.
bool yield() noexcept {
  SpinBudget budget;
  if (!budget.pays()) return false;
  sched_yield();
  budget.check();
  return true;
}

microseconds doubled(uint32_t times) noexcept {
  return std::min(kShortestBackoffSleep * (1 << std::min<uint32_t>(times, 10)),
                  kLongestBackoffSleep);
}

}  // namespace

void Backoff::reset() noexcept {
  if (sleeps_ > 0) {
    halvings_ = std::min(halvings_ + 1, kMostPollHalvings);
  } else if (polls_ > most_polls() / 2 && halvings_ > 0) {
    --halvings_;
  }
  polls_ = sleeps_ = 0;
  doublings_ -= std::min(doublings_, kWakeupDoublingsUndone);
  woken_ = false;
  can_be_woken_ = sleep_until_ != nullptr;
}

uint32_t Backoff::most_polls() const noexcept {
  const uint32_t spins = oversubscribed_ ? 0 : kPollsBeforeYield;
  return can_be_woken_ ? (spins + kYieldsBeforeWakeableSleep) >> halvings_
                       : spins + kYieldsBeforeSleep;
}

void Backoff::pause() {
  if (polls_ < most_polls()) {
    const bool spins = !oversubscribed_ && polls_ < kPollsBeforeYield;
    ++polls_;
    if (spins) return relax();
    if (yield()) return;
    polls_ = most_polls();
  }
  sleep();
}

// A wake-up may announce only a part of a large message. A pause before the next poll lets more of
// the message arrive, so that the poll does not receive it packet by packet.
void Backoff::sleep() {
  if (woken_) {
    std::this_thread::sleep_for(doubled(doublings_));
    doublings_ = std::min(doublings_ + 1, kMostWakeupDoublings);
    woken_ = false;
    return;
  }
  if (can_be_woken_) {
    const Slept slept = sleep_until_(std::chrono::steady_clock::now() + kLongestBackoffSleep);
    can_be_woken_ = slept != Slept::kNoWakeup;
    woken_ = slept == Slept::kWoken;
    if (can_be_woken_) {
      ++sleeps_;
      return;
    }
    if (polls_ < most_polls()) return;
  }
  std::this_thread::sleep_for(doubled(sleeps_++ / kSleepsPerDoubling));
}

}  // namespace hbm::progress
