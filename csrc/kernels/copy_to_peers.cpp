#include "kernels/copy_to_peers.h"

#include <algorithm>

#include "kernels/copy.h"
#include "kernels/tuning.h"

namespace hbm {

void CachePreference::take(std::chrono::nanoseconds through,
                           std::chrono::nanoseconds past) noexcept {
  int step = 0;
  if (100 * through > kNonTemporalAbovePercent * past) step = 1;
  if (100 * through < kCachedBelowPercent * past) step = -1;
  const int score = score_.load(std::memory_order_relaxed);
  score_.store(std::clamp(score + step, 0, 2 * kAgreeingTrials - 1), std::memory_order_relaxed);
}

void CopyToPeers::operator()(void* dst, const void* src, size_t bytes) noexcept {
  if (!kCopiesPastCaches || bytes < kNonTemporalPeerCopyBytes) return copy_bytes(dst, src, bytes);
  if (bytes >= kTimedPeerCopyBytes && bytes < streamed_bytes()) {
    const uint32_t turn = turn_.fetch_add(1, std::memory_order_relaxed);
    const bool is_trial = turn < kFirstTrialPeerCopies || turn % kPeerCopiesPerTrial < 2;
    if (is_trial) return timed(dst, src, bytes, turn);
  }
  preference_.past() ? copy_past_caches(dst, src, bytes) : copy_bytes(dst, src, bytes);
}

void CopyToPeers::timed(void* dst, const void* src, size_t bytes, uint32_t turn) noexcept {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  const bool past = turn % 2 == 1;
  past ? copy_past_caches(dst, src, bytes) : copy_bytes(dst, src, bytes);
  const auto taken = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start);
  const auto each = taken.count() * 1024 / static_cast<int64_t>(bytes);
  if (!past) {
    through_.store(each, std::memory_order_relaxed);
  } else {
    preference_.take(std::chrono::nanoseconds(through_.load(std::memory_order_relaxed)),
                     std::chrono::nanoseconds(each));
  }
}

}  // namespace hbm
