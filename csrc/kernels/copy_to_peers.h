// Copies into memory that ranks share, which a peer has read before and reads next.
//
// A store takes the cache line back from the peer's processor. Where the two share a cache, that
// costs little, and the peer finds the line in the cache; where they do not, as on two chiplets, it
// is slow, and stores past the caches are much faster, for the peer too, which then reads from
// memory. (Measured on an AMD Zen 2, 64 KiB, to write and to read: 2.5 and 1.5 us within one
// cluster of cores, past the caches 2.8 and 4.1; between two clusters 10.6 and 6.0, past the caches
// 3.0 and 4.0.) Where ranks run is for the scheduler, and virtual machines do not tell which caches
// they share, so now and then both ways are timed.
//
// The bytes are the same either way.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "kernels/tuning.h"

namespace hbm {

// Whether to store past the caches, by what pairs of copies took. One pair may be off, because a
// thread lost its processor meanwhile, so it takes two that agree.
class CachePreference {
 public:
  void take(std::chrono::nanoseconds through, std::chrono::nanoseconds past) noexcept;
  bool past() const noexcept { return score_.load(std::memory_order_relaxed) >= kAgreeingTrials; }

 private:
  std::atomic<int> score_{0};  // from 0 to 2 kAgreeingTrials - 1
};

// Threads: any; they share one object's choice.
class CopyToPeers {
 public:
  // Copies as copy_bytes() does: the bytes are there before the caller's next release.
  void operator()(void* dst, const void* src, size_t bytes) noexcept;

 private:
  void timed(void* dst, const void* src, size_t bytes, uint32_t turn) noexcept;

  // Relaxed, as the rest: a guess that another thread has changed is as good.
  std::atomic<uint32_t> turn_{0};
  std::atomic<int64_t> through_{0};  // nanoseconds of the copy through the caches of this pair
  CachePreference preference_;
};

}  // namespace hbm
