#include "progress/backoff.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/waiting.h"

namespace hbm {
namespace {

constexpr uint32_t kSpins = 64;          // about 15 us of polling MPI
constexpr uint32_t kYields = 2000;       // then give the core away, still quick to notice
constexpr uint32_t kShortestSleep = 20;  // us; the kernel's timer slack adds about 50
constexpr uint32_t kLongestSleep = 1000;

// False, at once, where a thread that yields would not come back soon.
bool yield() noexcept {
  SpinBudget budget;
  if (!budget.pays()) return false;
  sched_yield();
  budget.look();
  return true;
}

}  // namespace

void Backoff::pause() noexcept {
  const uint32_t spins = crowded_ ? 0 : kSpins;
  if (idle_polls_ < spins) {
    relax();
  } else if (idle_polls_ < spins + kYields && !yield()) {
    idle_polls_ = spins + kYields;
  }
  if (idle_polls_ >= spins + kYields) {
    const uint32_t doublings = std::min<uint32_t>((idle_polls_ - spins - kYields) / 16, 10);
    const uint32_t us = std::min(kShortestSleep << doublings, kLongestSleep);
    std::this_thread::sleep_for(std::chrono::microseconds(us));
  }
  ++idle_polls_;
}

}  // namespace hbm
