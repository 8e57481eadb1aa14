// Backoff of a polling loop: a short spin, then yields, then sleeps that grow to a millisecond.
//
// If messages wake the sleeper (Operation::sleep), a loop sleeps soon. Otherwise it yields for
// long, because a message that arrives during a sleep is found only at the end of the sleep.
//
// Polling does not pay in long waits. So if messages wake the sleeper, and a wait has slept, the
// next wait polls less before it sleeps.
//
// Threads: an object belongs to one thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <utility>

#include "progress/operation.h"

namespace hbm::progress {

class Backoff {
 public:
  using Sleep = std::function<Slept(std::chrono::steady_clock::time_point until)>;

  // `oversubscribed`: true if there are more ranks than usable processors. Then a spinning thread
  // only takes a processor that a peer needs. `sleep`: sleeps as Operation::sleep() does; null:
  // nothing would wake the sleeper.
  explicit Backoff(bool oversubscribed, Sleep sleep = nullptr)
      : oversubscribed_(oversubscribed),
        sleep_until_(std::move(sleep)),
        can_be_woken_(sleep_until_ != nullptr) {}

  // Called after progress: the next pause() begins a new wait.
  void reset() noexcept;
  // Spins, yields or sleeps once, after a poll without progress.
  void pause();

 private:
  uint32_t most_polls() const noexcept;
  void sleep();

  const bool oversubscribed_;
  const Sleep sleep_until_;
  bool can_be_woken_;       // as far as is known, something would wake the sleeper
  uint32_t halvings_ = 0;   // of the number of polls before the first sleep
  uint32_t polls_ = 0;      // of this wait
  uint32_t sleeps_ = 0;     // of this wait
  uint32_t doublings_ = 0;  // of the sleep after a wake-up
  bool woken_ = false;      // the last sleep was ended by a wake-up
};

}  // namespace hbm::progress
