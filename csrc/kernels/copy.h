// Copies the payloads of collectives, past the caches when they are large.
#pragma once

#include <cstddef>
#include <filesystem>

namespace hbm {

// Returns the least bytes of a copy, or of what an operation has to keep in the caches, whose
// stores are non-temporal on x86-64: a part of this machine's last-level cache (level 3), at most
// kNonTemporalFromAtMostBytes (tuning.h).
size_t streamed_bytes() noexcept;

// The same for the caches that the kernel describes in a folder, as in
// /sys/devices/system/cpu/cpu0/cache.
size_t streamed_bytes_of(const std::filesystem::path& caches);

// Copies `bytes` bytes; ordered before the caller's next release as any plain store is.
// REQUIRES: dst and src do not overlap. Neither needs alignment.
void copy_bytes(void* dst, const void* src, size_t bytes) noexcept;

// The same for a part of a copy that has `whole` bytes in all.
void copy_part(void* dst, const void* src, size_t bytes, size_t whole) noexcept;

// The same past the caches, however few bytes; where the processor cannot, through them.
void copy_past_caches(void* dst, const void* src, size_t bytes) noexcept;
#if defined(__x86_64__)
inline constexpr bool kCopiesPastCaches = true;
#else
inline constexpr bool kCopiesPastCaches = false;
#endif

}  // namespace hbm
