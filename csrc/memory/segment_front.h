// The first part of a segment, which is handed out without a heap: what groups of processes need to
// meet, and to work with ordinary tensors as long as there is room.
//
// Threads: every member may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>

#include "memory/buddy.h"

namespace hbm::memory {

class SegmentFront {
 public:
  // Takes a part of a segment of `segment_bytes` at `base`.
  SegmentFront(std::byte* base, uint64_t segment_bytes);
  SegmentFront(const SegmentFront&) = delete;
  SegmentFront& operator=(const SegmentFront&) = delete;

  size_t size() const noexcept { return size_; }  // 0 in a small segment

  // Returns at least `bytes` bytes, aligned to a cache line, or to a page from a page up; null when
  // no free range is as long.
  void* take(size_t bytes);

  // REQUIRES: `block` came from take() and was not given back since.
  void give_back(void* block) noexcept;

 private:
  std::byte* const base_;
  const size_t size_;
  std::mutex mutex_;  // guards ranges_
  Buddy ranges_;
};

}  // namespace hbm::memory
