#include "kernels/copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>

#include "kernels/tuning.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace hbm::kernels {
namespace {

constexpr size_t kLine = 64;

#if defined(__x86_64__)

// REQUIRES: dst is aligned to kLine, and bytes is a multiple of kLine.
void store_non_temporal(std::byte* dst, const std::byte* src, size_t bytes) noexcept {
  for (size_t at = 0; at < bytes; at += kLine) {
    _mm_prefetch(reinterpret_cast<const char*>(src + at) + kPrefetchAheadBytes, _MM_HINT_T0);
    __m128i line[kLine / sizeof(__m128i)];
    std::memcpy(line, src + at, kLine);
    auto* const to = reinterpret_cast<__m128i*>(dst + at);
    for (size_t i = 0; i < std::size(line); ++i) _mm_stream_si128(to + i, line[i]);
  }
  _mm_sfence();
}

#endif

}  // namespace

size_t non_temporal_bytes() noexcept {
  static const size_t bytes = non_temporal_bytes_of("/sys/devices/system/cpu/cpu0/cache");
  return bytes;
}

size_t non_temporal_bytes_of(const std::filesystem::path& caches) {
  size_t kibibytes = 0;  // the kernel writes "16384K"
  std::ifstream(caches / "index3/size") >> kibibytes;
  const size_t part = kibibytes * 1024 / kNonTemporalCacheDivisor;
  return part == 0 ? kNonTemporalFromAtMostBytes : std::min(part, kNonTemporalFromAtMostBytes);
}

void copy_bytes(void* dst, const void* src, size_t bytes) noexcept {
  copy_part(dst, src, bytes, bytes);
}

void copy_part(void* dst, const void* src, size_t bytes, size_t whole) noexcept {
  if (kHasNonTemporalStores && bytes >= kLine && whole >= non_temporal_bytes()) {
    copy_non_temporal(dst, src, bytes);
    return;
  }
  for (size_t at = 0; at < bytes; at += kMemcpyPartBytes) {
    std::memcpy(static_cast<std::byte*>(dst) + at, static_cast<const std::byte*>(src) + at,
                std::min(kMemcpyPartBytes, bytes - at));
  }
}

void copy_non_temporal(void* dst, const void* src, size_t bytes) noexcept {
#if defined(__x86_64__)
  auto* const to = static_cast<std::byte*>(dst);
  const auto* const from = static_cast<const std::byte*>(src);
  const size_t head = std::min(-reinterpret_cast<uintptr_t>(dst) % kLine, bytes);
  const size_t body = (bytes - head) / kLine * kLine;
  std::memcpy(to, from, head);
  store_non_temporal(to + head, from + head, body);
  std::memcpy(to + head + body, from + head + body, bytes - head - body);
#else
  copy_bytes(dst, src, bytes);
#endif
}

}  // namespace hbm::kernels
