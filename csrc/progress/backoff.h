// How a polling loop waits: a short spin, then yields, then sleeps that grow to a millisecond.
//
// If messages wake the sleeper (Operation::sleep), a loop sleeps soon. Else it yields for long,
// since a message that comes during a sleep is found only after it. After a wait that came to
// sleep, the next one polls less before it sleeps, if something can wake it: the wait is longer
// than polling pays for.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <utility>

#include "progress/operation.h"

namespace hbm {

class Backoff {
 public:
  using Sleep = std::function<Slept(std::chrono::steady_clock::time_point until)>;

  // `crowded`: more runnable ranks than cores, so spinning only keeps the peer from its turn.
  // `sleep`: sleeps as Operation::sleep() does; null: nothing would wake the sleeper.
  explicit Backoff(bool crowded, Sleep sleep = nullptr)
      : crowded_(crowded), sleep_until_(std::move(sleep)), can_be_woken_(sleep_until_ != nullptr) {}

  // Something moved: the next pause() begins a new wait.
  void reset() noexcept;
  void pause();

 private:
  uint32_t most_looks() const noexcept;
  void sleep();

  const bool crowded_;
  const Sleep sleep_until_;
  bool can_be_woken_;     // something would wake the sleeper, as far as is known
  uint32_t fewer_ = 0;    // halvings of what the next wait looks before it sleeps
  uint32_t looks_ = 0;    // of this wait
  uint32_t sleeps_ = 0;   // of this wait
  uint32_t in_vain_ = 0;  // doublings of the sleep after one that was ended in vain
  bool woken_ = false;    // by the last sleep
};

}  // namespace hbm
