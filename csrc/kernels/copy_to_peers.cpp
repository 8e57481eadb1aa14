#include "kernels/copy_to_peers.h"

#include <algorithm>

#include "kernels/copy.h"
#include "kernels/tuning.h"

namespace hbm::kernels {

void CachePreference::record(std::chrono::nanoseconds cached,
                             std::chrono::nanoseconds non_temporal) noexcept {
  const auto count = [&](std::atomic<int>& score, int above_percent, int below_percent) {
    int step = 0;
    if (100 * cached > above_percent * non_temporal) step = 1;
    if (100 * cached < below_percent * non_temporal) step = -1;
    const int before = score.load(std::memory_order_relaxed);
    score.store(std::clamp(before + step, 0, 2 * kAgreeingTrials - 1), std::memory_order_relaxed);
  };
  count(score_, kNonTemporalAbovePercent, kCachedBelowPercent);
  count(short_score_, kShortNonTemporalAbovePercent, kShortCachedBelowPercent);
}

void CopyToPeers::operator()(void* dst, const void* src, size_t bytes) noexcept {
  constexpr bool cached = !kHasNonTemporalStores;
  if (cached || bytes < kNonTemporalPeerCopyBytes) return copy_bytes(dst, src, bytes);
  if (bytes >= kTimedPeerCopyBytes && bytes < non_temporal_bytes()) {
    const uint32_t turn = turn_.fetch_add(1, std::memory_order_relaxed);
    const bool is_trial = turn < kFirstTrialPeerCopies || turn % kPeerCopiesPerTrial < 2;
    if (is_trial) return timed(dst, src, bytes, turn);
  }
  preference_.non_temporal(bytes) ? copy_non_temporal(dst, src, bytes)
                                  : copy_bytes(dst, src, bytes);
}

void CopyToPeers::timed(void* dst, const void* src, size_t bytes, uint32_t turn) noexcept {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  const bool non_temporal = turn % 2 == 1;
  non_temporal ? copy_non_temporal(dst, src, bytes) : copy_bytes(dst, src, bytes);
  const auto taken = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start);
  const auto each = taken.count() * 1024 / static_cast<int64_t>(bytes);
  if (!non_temporal) {
    cached_.store(each, std::memory_order_relaxed);
  } else {
    preference_.record(std::chrono::nanoseconds(cached_.load(std::memory_order_relaxed)),
                       std::chrono::nanoseconds(each));
  }
}

}  // namespace hbm::kernels
