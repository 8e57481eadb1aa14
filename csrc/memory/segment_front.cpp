#include "memory/segment_front.h"

#include <algorithm>

#include "memory/tuning.h"

namespace hbm::memory {
namespace {

constexpr uint64_t kCacheLine = 64;
constexpr uint64_t kHugePage = uint64_t{2} << 20;  // the heap begins behind whole ones

}  // namespace

SegmentFront::SegmentFront(std::byte* base, uint64_t segment_bytes)
    : base_(base),
      size_(std::min(kLargestSegmentFrontBytes, segment_bytes / kSegmentFrontDivisor) / kHugePage *
            kHugePage),
      ranges_(size_, kCacheLine, kLargestSegmentFrontBytes) {}

void* SegmentFront::take(size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto offset = ranges_.allocate(bytes);
  return offset ? base_ + *offset : nullptr;
}

void SegmentFront::give_back(void* block) noexcept {
  const std::lock_guard lock(mutex_);
  ranges_.free(static_cast<uint64_t>(static_cast<std::byte*>(block) - base_));
}

}  // namespace hbm::memory
