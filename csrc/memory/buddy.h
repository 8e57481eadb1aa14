// Buddy allocator: hands out ranges whose sizes are powers of two, from a space of offsets.
//
// A range of 2^k units starts at a multiple of its size. A free one is split in halves until it
// fits; a freed one is merged with its other half whenever that is free too. It is arithmetic
// alone: no memory is touched.
//
// Threads: one at a time.
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
  // `space` bytes, of which whole smallest ranges are used; it need not be a power of two.
  // REQUIRES: powers of two, smallest <= largest.
  Buddy(uint64_t space, uint64_t smallest, uint64_t largest);

  // The offset of a range of at least `bytes` bytes (0 counts as 1): of the smallest free ones that
  // hold it, the lowest. None when there is none, or when bytes is past `largest`.
  std::optional<uint64_t> allocate(uint64_t bytes);

  // REQUIRES: offset came from allocate() and was not freed since.
  void free(uint64_t offset);

  uint64_t free_bytes() const noexcept { return space_ - used_; }
  uint64_t largest_free_bytes() const noexcept;

  // How much smaller than the largest range of this space the free one is that a free byte lies in,
  // on average. 0: all that is free can be had in ranges of the largest size, or nothing is free;
  // towards 1: only in small pieces.
  double fragmentation() const noexcept;

 private:
  size_t order_of(uint64_t bytes) const noexcept;
  uint64_t size_of(size_t order) const noexcept { return smallest_ << order; }

  const uint64_t smallest_;
  const uint64_t space_;
  std::vector<std::set<uint64_t>> free_;        // by order: offsets of free ranges
  std::unordered_map<uint64_t, size_t> taken_;  // offset -> order
  uint64_t used_ = 0;                           // bytes in ranges handed out
};

}  // namespace hbm::memory
