// Ways to wait for another thread: a pause, a short spin before a sleep, and a sleep on a word of
// memory that processes share.
//
// Threads: any thread; futexes also take those of any process that maps the word.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace hbm {

// Tells the processor that this thread spins, between two looks at a word that another changes.
inline void relax() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// How long to look before a sleep. Waking a thread can take longer than the answer that it waits
// for: tens of microseconds where the processor went idle meanwhile, most of all a virtual one.
inline constexpr std::chrono::microseconds kSpin{50};

// Calls look() until it is true, for kSpin at most, and lets other threads go first. Returns what
// it was last.
template <class Look>
bool spin(Look look) {
  const auto until = std::chrono::steady_clock::now() + kSpin;
  while (!look()) {
    if (std::chrono::steady_clock::now() >= until) return false;
    std::this_thread::yield();
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
