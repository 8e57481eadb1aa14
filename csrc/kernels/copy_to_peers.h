// Copies into memory that ranks share. The peer has read this memory before, and reads it again
// after the copy.
//
// A cached store takes the cache line back from the peer's processor. If the two processors share a
// cache, the store costs little, and the peer finds the line in the cache. If they share no cache,
// as on two chiplets, the store is slow. Non-temporal stores are then much faster, also for the
// peer, which reads from memory. The scheduler decides where ranks run, and virtual machines hide
// which caches they share, so CopyToPeers times both kinds of store occasionally.
//
// The times in us on an AMD Zen 2, for 64 KiB:
//
//                                  the copy   the peer's reads
//   one cluster, cached                 2.5                1.5
//   one cluster, non-temporal           2.8                4.1
//   two clusters, cached               10.6                6.0
//   two clusters, non-temporal          3.0                4.0
//
// Copies below kTimedPeerCopyBytes have a choice of their own, because the fence after non-temporal
// stores takes a large part of their time. They were slower with these stores on processors between
// which a cached copy of 16 KiB took 3 times as long as a non-temporal one. They were faster where
// it took 11 times as long (docs/notes/2026-11-30-short-copies.md).
//
// Both kinds of store copy the same bytes.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "kernels/tuning.h"

namespace hbm::kernels {

// Chooses cached or non-temporal stores from timed pairs of copies. One pair cannot reverse a
// choice that earlier pairs have confirmed, because preemption may have distorted the pair: two
// pairs must agree.
class CachePreference {
 public:
  // Records the times of a pair of copies of kTimedPeerCopyBytes or more.
  void record(std::chrono::nanoseconds cached, std::chrono::nanoseconds non_temporal) noexcept;
  // Returns the choice for a copy of `bytes` bytes.
  bool non_temporal(size_t bytes) const noexcept {
    const auto& score = bytes < kTimedPeerCopyBytes ? short_score_ : score_;
    return score.load(std::memory_order_relaxed) >= kAgreeingTrials;
  }

 private:
  // From 0 to 2 * kAgreeingTrials - 1.
  std::atomic<int> score_{0};
  std::atomic<int> short_score_{0};  // of copies below kTimedPeerCopyBytes
};

// Copies with the preferred kind of store. Threads: any; all threads share the object's choice.
class CopyToPeers {
 public:
  // Copies as copy_bytes() does, ordered before the caller's next release.
  void operator()(void* dst, const void* src, size_t bytes) noexcept;

 private:
  void timed(void* dst, const void* src, size_t bytes, uint32_t turn) noexcept;

  // Counts the copies whose size is in the timed range. Relaxed, like the other members: a value
  // that another thread has just replaced is still a good estimate.
  std::atomic<uint32_t> turn_{0};
  std::atomic<int64_t> cached_{0};  // ns per KiB of the last timed cached copy
  CachePreference preference_;
};

}  // namespace hbm::kernels
