#include "kernels/copy_to_peers.h"

#include <algorithm>

#include "kernels/copy.h"

namespace hbm {
namespace {

constexpr size_t kLeastBytes = 4096;      // less is not worth a fence
constexpr size_t kLeastTimed = 16 << 10;  // of which the clock is a small part
constexpr uint32_t kTurns = 32;           // of which the first two are a pair
constexpr uint32_t kTurnsAtFirst = 4;     // are pairs

}  // namespace

// Writing is half of the matter: the peer reads sooner what lies in a cache that it shares. So past
// the caches must be twice as fast, and two thirds are enough to stay.
void CachePreference::take(std::chrono::nanoseconds through,
                           std::chrono::nanoseconds past) noexcept {
  int step = 0;
  if (through > 2 * past) step = 1;
  if (2 * through < 3 * past) step = -1;
  const int score = score_.load(std::memory_order_relaxed);
  score_.store(std::clamp(score + step, 0, 2 * kSure - 1), std::memory_order_relaxed);
}

void CopyToPeers::operator()(void* dst, const void* src, size_t bytes) noexcept {
  if (!kCopiesPastCaches || bytes < kLeastBytes) return copy_bytes(dst, src, bytes);
  if (bytes >= kLeastTimed && bytes < streamed_bytes()) {
    const uint32_t turn = turn_.fetch_add(1, std::memory_order_relaxed);
    if (turn < kTurnsAtFirst || turn % kTurns < 2) return timed(dst, src, bytes, turn);
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
