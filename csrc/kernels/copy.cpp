#include "kernels/copy.h"

#include <cstdint>
#include <cstring>
#include <iterator>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace hbm {
namespace {

#if defined(__x86_64__)

constexpr size_t kLine = 64;

// REQUIRES: dst is aligned to kLine, bytes a multiple of it.
void stream(std::byte* dst, const std::byte* src, size_t bytes) noexcept {
  for (size_t at = 0; at < bytes; at += kLine) {
    __m128i line[kLine / sizeof(__m128i)];
    std::memcpy(line, src + at, kLine);
    auto* const to = reinterpret_cast<__m128i*>(dst + at);
    for (size_t i = 0; i < std::size(line); ++i) _mm_stream_si128(to + i, line[i]);
  }
  _mm_sfence();
}

void copy_streamed(void* dst, const void* src, size_t bytes) noexcept {
  auto* const to = static_cast<std::byte*>(dst);
  const auto* const from = static_cast<const std::byte*>(src);
  const size_t head = -reinterpret_cast<uintptr_t>(dst) % kLine;
  const size_t body = (bytes - head) / kLine * kLine;
  std::memcpy(to, from, head);
  stream(to + head, from + head, body);
  std::memcpy(to + head + body, from + head + body, bytes - head - body);
}

#endif

}  // namespace

void copy_bytes(void* dst, const void* src, size_t bytes) noexcept {
  copy_part(dst, src, bytes, bytes);
}

void copy_part(void* dst, const void* src, size_t bytes, [[maybe_unused]] size_t whole) noexcept {
#if defined(__x86_64__)
  if (whole >= kStreamedBytes && bytes >= kLine) {
    copy_streamed(dst, src, bytes);
    return;
  }
#endif
  if (bytes != 0) std::memcpy(dst, src, bytes);
}

}  // namespace hbm
