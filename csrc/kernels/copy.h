// Copies the payloads of collectives, past the caches when they are large.
#pragma once

#include <cstddef>
#include <filesystem>

namespace hbm {

// The least bytes of a copy, or of what an operation has to keep in the caches, whose stores, on
// x86-64, go past them: the destination would not stay until it is read, and its old contents need
// not be fetched first. Half of the last cache (level 3) of this machine, but at most
// kStreamedBytesAtMost, which also holds where the kernel does not tell its size. (Measured with 32
// MiB of it: from 8 MiB on the stores alone are faster, by 1.2 times at 16 MiB, but a reader of
// less than half of it would pay more than that; with 16 MiB, 8 MiB take 0.6 of the time, and 4
// MiB 1.4 times as long.)
size_t streamed_bytes() noexcept;

inline constexpr size_t kStreamedBytesAtMost = size_t{16} << 20;

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
