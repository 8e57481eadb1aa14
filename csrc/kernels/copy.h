// Copies the payloads of collectives, past the caches when they are large.
#pragma once

#include <cstddef>

namespace hbm {

// The least bytes of a copy whose stores, on x86-64, go past the caches: such a destination would
// not stay in them until it is read, and its old contents need not be fetched first. (Measured with
// 1 MiB of L2 and 32 MiB of L3: from 8 MiB on the stores alone are faster, by 1.2 times at 16 MiB;
// a reader of less than half of L3 would pay more than that.)
inline constexpr size_t kStreamedBytes = size_t{16} << 20;

// Copies `bytes` bytes; ordered before the caller's next release as any plain store is.
// REQUIRES: dst and src do not overlap. Neither needs alignment.
void copy_bytes(void* dst, const void* src, size_t bytes) noexcept;

// The same for a part of a copy that has `whole` bytes in all.
void copy_part(void* dst, const void* src, size_t bytes, size_t whole) noexcept;

}  // namespace hbm
