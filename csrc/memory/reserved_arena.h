// The reserved arena at the start of a segment, which works without a heap. Groups of processes
// allocate their control regions here, and the blocks of large messages while there is room.
//
// Threads: every member may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>

#include "memory/buddy.h"

namespace hbm::memory {

class ReservedArena {
 public:
  // Reserves the first part of a segment of `segment_bytes` at `base`.
  ReservedArena(std::byte* base, uint64_t segment_bytes);
  ReservedArena(const ReservedArena&) = delete;
  ReservedArena& operator=(const ReservedArena&) = delete;

  size_t size() const noexcept { return size_; }  // 0 if the segment is too short

  // Returns at least `bytes` bytes, aligned to a cache line, or to a page if the block has a page
  // or more. Returns null if no free range is long enough.
  void* allocate(size_t bytes);

  // Frees a block. REQUIRES: `block` came from allocate() and has not been freed since.
  void free(void* block) noexcept;

 private:
  std::byte* const base_;
  const size_t size_;
  std::mutex mutex_;  // guards ranges_
  Buddy ranges_;
};

}  // namespace hbm::memory
