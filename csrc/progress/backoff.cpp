#include "progress/backoff.h"

#include <sched.h>

#include <algorithm>
#include <thread>

#include "base/waiting.h"
#include "progress/tuning.h"

namespace hbm {
namespace {

using std::chrono::microseconds;

// False, at once, where a thread that yields would not come back soon.
bool yield() noexcept {
  SpinBudget budget;
  if (!budget.pays()) return false;
  sched_yield();
  budget.look();
  return true;
}

microseconds doubled(uint32_t times) noexcept {
  return std::min(kShortestBackoffSleep * (1 << std::min<uint32_t>(times, 10)),
                  kLongestBackoffSleep);
}

}  // namespace

void Backoff::reset() noexcept {
  if (sleeps_ > 0) {
    fewer_ = std::min(fewer_ + 1, kMostPollHalvings);
  } else if (looks_ > most_looks() / 2 && fewer_ > 0) {
    --fewer_;
  }
  looks_ = sleeps_ = 0;
  in_vain_ -= std::min(in_vain_, kVainDoublingsUndone);
  woken_ = false;
  can_be_woken_ = sleep_until_ != nullptr;
}

uint32_t Backoff::most_looks() const noexcept {
  const uint32_t spins = crowded_ ? 0 : kPollsBeforeYield;
  return can_be_woken_ ? (spins + kYieldsBeforeWakeableSleep) >> fewer_
                       : spins + kYieldsBeforeSleep;
}

void Backoff::pause() {
  if (looks_ < most_looks()) {
    const bool spins = !crowded_ && looks_ < kPollsBeforeYield;
    ++looks_;
    if (spins) return relax();
    if (yield()) return;
    looks_ = most_looks();
  }
  sleep();
}

// What woke the last sleep may be a part of a large message. Then more of it is left to come before
// the next look, so that it is not taken in packet by packet.
void Backoff::sleep() {
  if (woken_) {
    std::this_thread::sleep_for(doubled(in_vain_));
    in_vain_ = std::min(in_vain_ + 1, kMostVainDoublings);
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
    if (looks_ < most_looks()) return;
  }
  std::this_thread::sleep_for(doubled(sleeps_++ / kSleepsPerDoubling));
}

}  // namespace hbm
