// A segment of a box on the same machine, mapped here.
//
// A forked child does not inherit it: a stray access there faults instead of changing the box's
// memory. An inherited object may be destroyed there, without effect, and not otherwise used.
//
// Threads: every member may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/fork.h"

namespace hbm::transport {

class SegmentMapping {
 public:
  // The first `bytes` bytes behind `descriptor`, which stays the caller's and may be closed at
  // once.
  // Throws Error(kInvalid) when it has fewer, Error(kExhausted) when address space is short,
  // Error(kUnavailable) when the kernel refuses for another reason.
  SegmentMapping(int descriptor, uint64_t bytes, bool writable);
  ~SegmentMapping();
  SegmentMapping(const SegmentMapping&) = delete;
  SegmentMapping& operator=(const SegmentMapping&) = delete;

  std::byte* base() const noexcept { return base_; }

 private:
  const ForkGuard fork_;
  const size_t bytes_;
  std::byte* base_ = nullptr;
};

}  // namespace hbm::transport
