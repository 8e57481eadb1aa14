#include "memory/buddy.h"

#include <algorithm>
#include <bit>

namespace hbm::memory {

Buddy::Buddy(uint64_t space, uint64_t smallest, uint64_t largest)
    : smallest_(smallest), space_(space / smallest * smallest) {
  const uint64_t top = std::bit_floor(std::min(largest, space_));
  if (top == 0) return;
  free_.resize(order_of(top) + 1);
  // The largest ranges come first. Each range is aligned, because all earlier ranges are multiples
  // of its size.
  uint64_t offset = 0;
  for (size_t order = free_.size(); order-- > 0;) {
    for (; space_ - offset >= size_of(order); offset += size_of(order)) {
      free_[order].insert(offset);
    }
  }
}

std::optional<uint64_t> Buddy::allocate(uint64_t bytes) {
  const size_t wanted = order_of(bytes);
  size_t order = wanted;
  while (order < free_.size() && free_[order].empty()) ++order;
  if (order >= free_.size()) return std::nullopt;
  const uint64_t offset = *free_[order].begin();
  free_[order].erase(free_[order].begin());
  while (order > wanted) {
    --order;
    free_[order].insert(offset + size_of(order));
  }
  taken_.emplace(offset, wanted);
  used_ += size_of(wanted);
  return offset;
}

void Buddy::free(uint64_t offset) {
  const auto entry = taken_.find(offset);
  size_t order = entry->second;
  taken_.erase(entry);
  used_ -= size_of(order);
  // The other half may be beyond the end of the space; then it is never free.
  while (order + 1 < free_.size() && free_[order].erase(offset ^ size_of(order)) != 0) {
    offset &= ~size_of(order);
    ++order;
  }
  free_[order].insert(offset);
}

uint64_t Buddy::largest_free_bytes() const noexcept {
  for (size_t order = free_.size(); order-- > 0;) {
    if (!free_[order].empty()) return size_of(order);
  }
  return 0;
}

double Buddy::fragmentation() const noexcept {
  if (free_bytes() == 0) return 0;
  double squares = 0;
  for (size_t order = 0; order < free_.size(); ++order) {
    const auto size = static_cast<double>(size_of(order));
    squares += static_cast<double>(free_[order].size()) * size * size;
  }
  const double average = squares / static_cast<double>(free_bytes());
  return 1 - average / static_cast<double>(size_of(free_.size() - 1));
}

// Returns an order beyond free_ if `bytes` is larger than the largest size.
size_t Buddy::order_of(uint64_t bytes) const noexcept {
  const uint64_t units = bytes / smallest_ + (bytes % smallest_ != 0 ? 1 : 0);
  return units <= 1 ? 0 : static_cast<size_t>(std::bit_width(units - 1));
}

}  // namespace hbm::memory
