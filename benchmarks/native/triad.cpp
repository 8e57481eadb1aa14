#include "triad.h"

#include <cstdint>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/error.h"

namespace hbm::bench {
namespace {

constexpr size_t kLine = 64;
constexpr float kFactor = 0.5F;

// REQUIRES: arrays are aligned to kLine and consist of whole lines.
using Kernel = void (*)(float* a, const float* b, const float* c, size_t count);

#if defined(__x86_64__)

void triad_sse(float* a, const float* b, const float* c, size_t count) {
  const __m128 factor = _mm_set1_ps(kFactor);
  for (size_t i = 0; i < count; i += 4) {
    const __m128 sum = _mm_add_ps(_mm_load_ps(b + i), _mm_mul_ps(factor, _mm_load_ps(c + i)));
    _mm_stream_ps(a + i, sum);
  }
  _mm_sfence();
}

// AVX2 is a fifth faster here than SSE, and AVX-512 is no faster than AVX2.
[[gnu::target("avx2")]] void triad_avx2(float* a, const float* b, const float* c, size_t count) {
  const __m256 factor = _mm256_set1_ps(kFactor);
  for (size_t i = 0; i < count; i += 8) {
    const __m256 sum =
        _mm256_add_ps(_mm256_load_ps(b + i), _mm256_mul_ps(factor, _mm256_load_ps(c + i)));
    _mm256_stream_ps(a + i, sum);
  }
  _mm_sfence();
}

Kernel best_kernel() { return __builtin_cpu_supports("avx2") ? triad_avx2 : triad_sse; }

#else

void triad_plain(float* a, const float* b, const float* c, size_t count) {
  for (size_t i = 0; i < count; ++i) a[i] = b[i] + kFactor * c[i];
}

Kernel best_kernel() { return triad_plain; }

#endif

bool aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % kLine == 0; }

}  // namespace

Triad::Triad(std::span<std::byte> a, std::span<const std::byte> b, std::span<const std::byte> c,
             size_t threads)
    : a_(a), b_(b), c_(c), together_(static_cast<std::ptrdiff_t>(threads)) {
  const bool same = a.size() == b.size() && b.size() == c.size() && a.size() % kLine == 0;
  if (threads == 0 || !same || !aligned(a.data()) || !aligned(b.data()) || !aligned(c.data())) {
    throw Error(ErrorKind::kInvalid,
                "a triad needs a thread, and three equal arrays of whole, aligned lines of " +
                    std::to_string(kLine) + " bytes");
  }
  for (size_t thread = 1; thread < threads; ++thread) {
    threads_.emplace_back([this, thread] {
      for (;;) {
        together_.arrive_and_wait();
        if (ending_) return;
        work(thread);
        together_.arrive_and_wait();
      }
    });
  }
}

Triad::~Triad() {
  ending_ = true;
  together_.arrive_and_wait();
}

void Triad::run() {
  together_.arrive_and_wait();
  work(0);
  together_.arrive_and_wait();
}

void Triad::work(size_t thread) {
  const size_t threads = threads_.size() + 1;
  const size_t lines = a_.size() / kLine;
  const size_t begin = lines * thread / threads * kLine;
  const size_t end = lines * (thread + 1) / threads * kLine;
  static const Kernel triad = best_kernel();
  triad(reinterpret_cast<float*>(a_.data() + begin),
        reinterpret_cast<const float*>(b_.data() + begin),
        reinterpret_cast<const float*>(c_.data() + begin), (end - begin) / sizeof(float));
}

}  // namespace hbm::bench
