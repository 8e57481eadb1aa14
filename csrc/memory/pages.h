// The kernel's pages.
//
// Threads: every function may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hbm::memory {

uint64_t small_page_bytes() noexcept;

// Of a transparent huge page; the small page's when the kernel has none.
uint64_t huge_page_bytes();

// REQUIRES: bytes is at least a page below the largest number.
inline uint64_t whole_pages(uint64_t bytes) noexcept {
  return (bytes + small_page_bytes() - 1) / small_page_bytes() * small_page_bytes();
}

// The largest page of shared memory that is mapped in [base, base + bytes), as the kernel says now.
// It looks through all mappings of the process: milliseconds, or more where they are large.
uint64_t largest_page_bytes(const void* base, size_t bytes);

}  // namespace hbm::memory
