// Ways to wait for another thread: a pause, a short spin before a sleep, and a sleep on a word of
// shared memory. SpinBudget decides whether spinning pays.
//
// Threads: any thread; futexes also work between processes that map the word.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "base/tuning.h"

namespace hbm {

// Hints to the processor that this thread spins, between two checks of a word that another thread
// changes.
inline void relax() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// The time for which a wait spins, or yields its processor, before it sleeps.
//
// Spinning and yielding pay if the thread runs again soon after the answer. On a busy core a
// yielding thread waits out the other threads' time slices; a sleeping thread runs soon after its
// wake-up. So a wait that lost the processor for kPreemptedAfter or longer sleeps immediately. So
// do all waits of the process that begin within a multiple of the lost time (kSleepPerPreemption).
// Then the next wait spins again. If it soon loses the processor again, waits sleep for at least
// twice as long, but at most kLongestTimeWithoutPolls. This costs little both under a lasting and
// under a brief shortage of processors.
class SpinBudget {
 public:
  using Clock = std::chrono::steady_clock;

  SpinBudget() noexcept : start_(Clock::now()), now_(start_), pays_(pays_at(start_)) {}

  // Returns false if the wait should sleep immediately.
  bool pays() const noexcept { return pays_; }

  // Returns false if the wait should sleep, or `most` has passed since the wait began.
  bool covers(std::chrono::nanoseconds most) const noexcept {
    return pays_ && now_ - start_ < most;
  }

  // Reads the clock, and detects a loss of the processor since the last call. Called between polls.
  void check() noexcept {
    const Clock::time_point now = Clock::now();
    if (now - now_ >= kPreemptedAfter) {
      pays_ = false;
      lost_processor(now, now - now_);
    }
    now_ = now;
  }

  // Reads the clock after work of the caller, whose time is not a loss of the processor.
  void skip() noexcept { now_ = Clock::now(); }

  Clock::time_point now() const noexcept { return now_; }  // of the last check() or skip()

 private:
  static bool pays_at(Clock::time_point now) noexcept;
  static void lost_processor(Clock::time_point now, std::chrono::nanoseconds away) noexcept;

  const Clock::time_point start_;
  Clock::time_point now_;
  bool pays_;
};

// Calls ready() until it returns true, for kSpinBeforeSleep at most, and yields to other threads.
// Returns the last result of ready().
template <class Ready>
bool spin(Ready ready) {
  SpinBudget budget;
  while (!ready()) {
    budget.skip();
    if (!budget.covers(kSpinBeforeSleep)) return false;
    std::this_thread::yield();
    budget.check();
  }
  return true;
}

// Sleeps while `word` is `expected`, at most for `most`. May wake without a change, so the caller
// checks the word again.
void futex_wait(const std::atomic<uint32_t>& word, uint32_t expected,
                std::chrono::nanoseconds most) noexcept;

// Wakes all threads that sleep on `word`.
void futex_wake(std::atomic<uint32_t>& word) noexcept;

}  // namespace hbm
