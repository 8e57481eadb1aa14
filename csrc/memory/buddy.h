// Buddy allocator: allocates ranges of a space of offsets. The sizes of ranges are powers of two.
//
// Each range starts at a multiple of its size. A free range is halved until it fits. A freed range
// is merged with its other half if both are free. The allocator only computes; it touches no
// memory.
//
// Threads: one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

namespace hbm::memory {

class Buddy {
 public:
  // Manages `space` bytes, rounded down to whole smallest ranges; `space` need not be a power of
  // two. REQUIRES: `smallest` and `largest` are powers of two, smallest <= largest.
  Buddy(uint64_t space, uint64_t smallest, uint64_t largest);

  // Returns the offset of a range of at least `bytes` bytes (0 counts as 1): the lowest of the
  // smallest free ranges that fit. Returns nothing if no range fits, or `bytes` is larger than
  // `largest`.
  std::optional<uint64_t> allocate(uint64_t bytes);

  // Frees a range. REQUIRES: `offset` came from allocate() and has not been freed since.
  void free(uint64_t offset);

  uint64_t free_bytes() const noexcept { return space_ - used_; }
  uint64_t largest_free_bytes() const noexcept;

  // Returns 1 - A / L. A is the average, over all free bytes, of the size of the free range that
  // contains the byte. L is the size of the largest range that this space can have. The result is 0
  // if no byte is free, or if all free ranges have the size L. It is near 1 if all free ranges are
  // short.
  double fragmentation() const noexcept;

 private:
  size_t order_of(uint64_t bytes) const noexcept;
  uint64_t size_of(size_t order) const noexcept { return smallest_ << order; }

  const uint64_t smallest_;
  const uint64_t space_;
  std::vector<std::set<uint64_t>> free_;        // by order: offsets of free ranges
  std::unordered_map<uint64_t, size_t> taken_;  // offset -> order
  uint64_t used_ = 0;                           // bytes in allocated ranges
};

}  // namespace hbm::memory
