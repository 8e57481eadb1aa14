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

}  // namespace

void Backoff::pause() noexcept {
  const uint32_t spins = crowded_ ? 0 : kSpins;
  const uint32_t step = idle_polls_++;
  if (step < spins) {
    relax();
  } else if (step < spins + kYields) {
    sched_yield();
  } else {
    const uint32_t doublings = std::min<uint32_t>((step - spins - kYields) / 16, 10);
    const uint32_t us = std::min(kShortestSleep << doublings, kLongestSleep);
    std::this_thread::sleep_for(std::chrono::microseconds(us));
  }
}

}  // namespace hbm
