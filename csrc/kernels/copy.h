// Copies the payloads of collectives; large copies use non-temporal stores.
//
// Threads: all functions may be called from any thread.
#pragma once

#include <cstddef>
#include <filesystem>

namespace hbm::kernels {

// Returns the size from which copies use non-temporal stores on x86-64. Operations also compare it
// with the bytes that they would have to keep in the caches. The size is a fraction of this
// machine's last-level cache (level 3), at most kNonTemporalFromAtMostBytes (tuning.h).
size_t non_temporal_bytes() noexcept;

// Returns the same size, computed from the caches that the directory `caches` describes. An example
// is /sys/devices/system/cpu/cpu0/cache.
size_t non_temporal_bytes_of(const std::filesystem::path& caches);

// Copies `bytes` bytes, ordered before the caller's next release like plain stores. REQUIRES: dst
// and src do not overlap. Neither needs alignment.
void copy_bytes(void* dst, const void* src, size_t bytes) noexcept;

// Copies `bytes` bytes, a part of a larger copy. The size of that copy, `whole` bytes, decides the
// kind of store.
void copy_part(void* dst, const void* src, size_t bytes, size_t whole) noexcept;

// Copies with non-temporal stores on x86-64, whatever the size; with plain stores on other
// processors.
void copy_non_temporal(void* dst, const void* src, size_t bytes) noexcept;
#if defined(__x86_64__)
inline constexpr bool kHasNonTemporalStores = true;
#else
inline constexpr bool kHasNonTemporalStores = false;
#endif

}  // namespace hbm::kernels
