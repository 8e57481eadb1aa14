#include "memory/reserved_arena.h"

#include <algorithm>

#include "memory/tuning.h"

namespace hbm::memory {
namespace {

constexpr uint64_t kCacheLine = 64;
constexpr uint64_t kHugePage = uint64_t{2} << 20;  // the arena has whole huge pages

}  // namespace

ReservedArena::ReservedArena(std::byte* base, uint64_t segment_bytes)
    : base_(base),
      size_(std::min(kLargestReservedArenaBytes, segment_bytes / kReservedArenaDivisor) /
            kHugePage * kHugePage),
      ranges_(size_, kCacheLine, kLargestReservedArenaBytes) {}

void* ReservedArena::allocate(size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto offset = ranges_.allocate(bytes);
  return offset ? base_ + *offset : nullptr;
}

void ReservedArena::free(void* block) noexcept {
  const std::lock_guard lock(mutex_);
  ranges_.free(static_cast<uint64_t>(static_cast<std::byte*>(block) - base_));
}

}  // namespace hbm::memory
