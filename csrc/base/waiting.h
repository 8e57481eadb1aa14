// Ways to wait for another thread: a pause, a short spin before a sleep, and a sleep on a word of
// memory that processes share; and whether to spin at all.
//
// Threads: any thread; futexes also take those of any process that maps the word.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "base/tuning.h"

namespace hbm {

// Tells the processor that this thread spins, between two looks at a word that another changes.
inline void relax() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// How long a wait spins, or gives its processor away for a moment, before it sleeps.
//
// Both pay while the thread can have its processor back when the answer comes. Where other threads
// compute, it waits until their slices end, and a thread that yields counts as one that has used
// its own; one that sleeps runs soon after it is woken. So a wait that lost the processor for as
// long as a slice sleeps at once, and so do all waits of the process that begin within a multiple
// of the time lost. The next one tries again; if it loses again, the time doubles. So little is
// lost where processors are short for long, and little where they were for a moment.
class SpinBudget {
 public:
  using Clock = std::chrono::steady_clock;

  SpinBudget() noexcept : start_(Clock::now()), now_(start_), pays_(pays_at(start_)) {}

  // False where the wait shall sleep at once.
  bool pays() const noexcept { return pays_; }

  // The same, or `most` has passed since the wait began.
  bool covers(std::chrono::nanoseconds most) const noexcept {
    return pays_ && now_ - start_ < most;
  }

  // Takes the time, and whether the processor was away since the last call. Called between looks.
  void look() noexcept {
    const Clock::time_point now = Clock::now();
    if (now - now_ >= kPreemptedAfter) {
      pays_ = false;
      lost_processor(now, now - now_);
    }
    now_ = now;
  }

  // The same after work of the caller's, during which the processor was not away.
  void skip() noexcept { now_ = Clock::now(); }

  Clock::time_point now() const noexcept { return now_; }  // of the last look() or skip()

 private:
  static bool pays_at(Clock::time_point now) noexcept;
  static void lost_processor(Clock::time_point now, std::chrono::nanoseconds away) noexcept;

  const Clock::time_point start_;
  Clock::time_point now_;
  bool pays_;
};

// Calls look() until it is true, for kSpinBeforeSleep at most, and lets other threads go first.
// Returns the last result of look().
template <class Look>
bool spin(Look look) {
  SpinBudget budget;
  while (!look()) {
    budget.skip();
    if (!budget.covers(kSpinBeforeSleep)) return false;
    std::this_thread::yield();
    budget.look();
  }
  return true;
}

// Sleeps while `word` is `expected`, at most for `most`. The caller looks at the word again: it may
// be woken without a change.
void futex_wait(const std::atomic<uint32_t>& word, uint32_t expected,
                std::chrono::nanoseconds most) noexcept;

// Wakes all who sleep on `word`.
void futex_wake(std::atomic<uint32_t>& word) noexcept;

}  // namespace hbm
