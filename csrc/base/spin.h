// A short look around before a sleep. Waking a thread can take longer than the answer that it waits
// for: tens of microseconds where the processor went idle meanwhile, most of all a virtual one.
#pragma once

#include <chrono>
#include <thread>

namespace hbm {

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

}  // namespace hbm
