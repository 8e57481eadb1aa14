// How a polling loop waits: a short spin, then yields, then sleeps that grow to a millisecond.
//
// Where something tells of messages that come (Operation::doze), a loop soon sleeps until it does;
// else it yields for long, since a message that comes meanwhile is found only after the sleep.
// After a wait that came to sleep, the next one looks less before it does, if something can end its
// sleep: what takes so long is not found by looking.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <utility>

#include "progress/operation.h"

namespace hbm {

class Backoff {
 public:
  using Doze = std::function<Slept(std::chrono::microseconds most)>;

  // `crowded`: more runnable ranks than cores, so spinning only keeps the peer from its turn.
  // `doze`: sleeps as Operation::doze() does; null: nothing tells of what comes.
  explicit Backoff(bool crowded, Doze doze = nullptr)
      : crowded_(crowded), doze_(std::move(doze)), told_(doze_ != nullptr) {}

  // Something moved: the next pause() begins a new wait.
  void reset() noexcept;
  void pause();

 private:
  uint32_t most_looks() const noexcept;
  void sleep();

  const bool crowded_;
  const Doze doze_;
  bool told_;             // doze_ sleeps, as far as is known
  uint32_t fewer_ = 0;    // halvings of what the next wait looks before it sleeps
  uint32_t looks_ = 0;    // of this wait
  uint32_t sleeps_ = 0;   // of this wait
  uint32_t in_vain_ = 0;  // doublings of the sleep after one that was ended in vain
  bool woken_ = false;    // by the last sleep
};

}  // namespace hbm
