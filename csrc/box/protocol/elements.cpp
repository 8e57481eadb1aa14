#include "box/protocol/elements.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <type_traits>

#include "box/protocol/tuning.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace hbm::box::protocol {
namespace {

constexpr uint64_t kElement = sizeof(uint64_t);

// The accesses must not take a lock: taking it would write to the shared memory, which may be
// mapped for reading only.
static_assert(std::atomic_ref<uint8_t>::is_always_lock_free &&
              std::atomic_ref<uint16_t>::is_always_lock_free &&
              std::atomic_ref<uint32_t>::is_always_lock_free &&
              std::atomic_ref<uint64_t>::is_always_lock_free);

struct LoadElement {
  template <typename T>
  static void one(std::byte* own, const std::byte* shared) noexcept {
    T& element = *reinterpret_cast<T*>(const_cast<std::byte*>(shared));
    const T value = std::atomic_ref<T>(element).load(std::memory_order_relaxed);
    std::memcpy(own, &value, sizeof(T));
  }
};

struct StoreElement {
  template <typename T>
  static void one(const std::byte* own, std::byte* shared) noexcept {
    T value;
    std::memcpy(&value, own, sizeof(T));
    std::atomic_ref<T>(*reinterpret_cast<T*>(shared)).store(value, std::memory_order_relaxed);
  }
};

#if defined(__x86_64__)

constexpr uint64_t kVector = sizeof(__m128i);
constexpr uint64_t kLine = 64;  // of a cache

bool is_aligned(const std::byte* address, uint64_t alignment) noexcept {
  return reinterpret_cast<uintptr_t>(address) % alignment == 0;
}

// Shared memory is accessed in assembler, since the compiler may replace a loop over plain vectors
// by memcpy(). REQUIRES: `shared` is aligned to kVector.
__m128i load_shared(const std::byte* shared) noexcept {
  __m128i vector;
  asm volatile("movdqa %1, %0" : "=x"(vector) : "m"(*reinterpret_cast<const __m128i*>(shared)));
  return vector;
}

void store_shared(std::byte* shared, __m128i vector) noexcept {
  asm volatile("movdqa %1, %0" : "=m"(*reinterpret_cast<__m128i*>(shared)) : "x"(vector));
}

__m128i load_own(const std::byte* own) noexcept {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(own));
}

// REQUIRES, for load_lines(), store_lines() and their non-temporal versions: `shared` is aligned to
// kVector, and `bytes` is a multiple of kLine.
void load_lines(std::byte* own, const std::byte* shared, uint64_t bytes) noexcept {
  for (uint64_t at = 0; at < bytes; at += kVector) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(own + at), load_shared(shared + at));
  }
}

void store_lines(std::byte* shared, const std::byte* own, uint64_t bytes) noexcept {
  for (uint64_t at = 0; at < bytes; at += kVector) store_shared(shared + at, load_own(own + at));
}

// REQUIRES: `to` is aligned to kVector.
template <__m128i (*load)(const std::byte*) noexcept>
void stream_lines(std::byte* to, const std::byte* from, uint64_t bytes) noexcept {
  for (uint64_t at = 0; at < bytes; at += kLine) {
    _mm_prefetch(reinterpret_cast<const char*>(from + at) + kElementPrefetchBytes, _MM_HINT_T0);
    __m128i line[kLine / kVector];
    for (size_t i = 0; i < std::size(line); ++i) line[i] = load(from + at + i * kVector);
    auto* const stored = reinterpret_cast<__m128i*>(to + at);
    for (size_t i = 0; i < std::size(line); ++i) _mm_stream_si128(stored + i, line[i]);
  }
  _mm_sfence();
}

// REQUIRES: `own` is aligned to kVector.
void load_lines_non_temporal(std::byte* own, const std::byte* shared, uint64_t bytes) noexcept {
  stream_lines<load_shared>(own, shared, bytes);
}

// REQUIRES: `shared` is aligned to kLine, so that whole lines go to memory. Each store has 16
// bytes. The manuals guarantee atomicity only for non-temporal stores of 8 bytes, which are slower.
// In practice, processors also store each element of the 16 bytes whole.
void store_lines_non_temporal(std::byte* shared, const std::byte* own, uint64_t bytes) noexcept {
  stream_lines<load_own>(shared, own, bytes);
}

#endif

// Copies element by element. On x86-64 it copies whole cache lines with larger accesses, which is
// faster.
template <typename Copy, typename Own, typename Shared>
class Walk {
 public:
  Walk(Own* own, Shared* shared, uint64_t bytes) noexcept
      : own_(own), shared_(shared), left_(bytes) {}

  void run(Stores stores) noexcept {
    align_past<uint8_t>();
    align_past<uint16_t>();
    align_past<uint32_t>();
    lines(stores);
    while (left_ >= kElement) step<uint64_t>();
    if (left_ >= sizeof(uint32_t)) step<uint32_t>();
    if (left_ >= sizeof(uint16_t)) step<uint16_t>();
    if (left_ > 0) step<uint8_t>();
  }

 private:
  // Aligns the shared address to a multiple of twice the size of T.
  template <typename T>
  void align_past() noexcept {
    if ((reinterpret_cast<uintptr_t>(shared_) & sizeof(T)) != 0 && left_ >= sizeof(T)) step<T>();
  }

  template <typename T>
  void step() noexcept {
    Copy::template one<T>(own_, shared_);
    advance(sizeof(T));
  }

  void advance(uint64_t bytes) noexcept {
    own_ += bytes;
    shared_ += bytes;
    left_ -= bytes;
  }

#if defined(__x86_64__)
  void lines(Stores stores) noexcept {
    if (left_ < kLine) return;
    constexpr bool loads = std::is_same_v<Copy, LoadElement>;
    const uint64_t alignment = stores == Stores::kCached || loads ? kVector : kLine;
    while (!is_aligned(shared_, alignment) && left_ >= kElement) step<uint64_t>();
    const uint64_t bytes = left_ / kLine * kLine;
    if constexpr (loads) {
      const bool aligned = is_aligned(own_, kVector);
      if (stores == Stores::kNonTemporal && aligned) {
        load_lines_non_temporal(own_, shared_, bytes);
      } else {
        load_lines(own_, shared_, bytes);
      }
    } else if (stores == Stores::kNonTemporal) {
      store_lines_non_temporal(shared_, own_, bytes);
    } else {
      store_lines(shared_, own_, bytes);
    }
    advance(bytes);
  }
#else
  void lines(Stores) noexcept {}
#endif

  Own* own_;
  Shared* shared_;
  uint64_t left_;
};

}  // namespace

void load_elements(std::byte* own, const std::byte* shared, uint64_t bytes,
                   Stores stores) noexcept {
  Walk<LoadElement, std::byte, const std::byte>(own, shared, bytes).run(stores);
}

void store_elements(std::byte* shared, const std::byte* own, uint64_t bytes,
                    Stores stores) noexcept {
  Walk<StoreElement, const std::byte, std::byte>(own, shared, bytes).run(stores);
}

uint64_t uncut_bytes(const std::byte* shared, uint64_t bytes, uint64_t all) noexcept {
  if (bytes >= all) return all;
  return bytes - std::min(bytes, (reinterpret_cast<uintptr_t>(shared) + bytes) % kElement);
}

}  // namespace hbm::box::protocol
