#include "base/waiting.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>

#include "base/tuning.h"

namespace hbm {
namespace {

// All threads of the process share these values, because they compete for the same processors.
// Relaxed: the values guard no data, and a value that another thread has just replaced is still a
// good estimate.
std::atomic<int64_t> sleeps_until{INT64_MIN};  // of the steady clock, ns
std::atomic<int64_t> sleeps_for{0};            // ns

int64_t nanoseconds(SpinBudget::Clock::time_point time) {
  return std::chrono::nanoseconds(time.time_since_epoch()).count();
}

}  // namespace

bool SpinBudget::pays_at(Clock::time_point now) noexcept {
  return nanoseconds(now) >= sleeps_until.load(std::memory_order_relaxed);
}

void SpinBudget::lost_processor(Clock::time_point now, std::chrono::nanoseconds away) noexcept {
  const int64_t time = nanoseconds(now);
  const int64_t last = sleeps_for.load(std::memory_order_relaxed);
  const bool again = last > 0 && time - sleeps_until.load(std::memory_order_relaxed) < last;
  const int64_t lost = kSleepPerPreemption * away.count();
  const int64_t next =
      std::min<int64_t>(again ? std::max(2 * last, lost) : lost,
                        std::chrono::nanoseconds(kLongestTimeWithoutPolls).count());
  sleeps_for.store(next, std::memory_order_relaxed);
  sleeps_until.store(time + next, std::memory_order_relaxed);
}

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) &&
              std::atomic<uint32_t>::is_always_lock_free);

// The calls omit FUTEX_PRIVATE_FLAG, because the waiters may be threads of other processes.

void futex_wait(const std::atomic<uint32_t>& word, uint32_t expected,
                std::chrono::nanoseconds most) noexcept {
  constexpr int64_t kSecond = 1'000'000'000;
  if (most.count() <= 0) return;
  const timespec limit{most.count() / kSecond, most.count() % kSecond};
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, &limit, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word) noexcept {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace hbm
