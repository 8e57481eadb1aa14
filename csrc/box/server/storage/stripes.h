// Locks for the chunks of all segments: a fixed number of mutexes, of which each chunk has one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace hbm::box {

class Stripes {
 public:
  // Threads: any. Two chunks may share a mutex, so a thread must hold one at a time.
  std::mutex& of(const void* segment, uint64_t chunk) noexcept {
    // Neighbouring chunks have different mutexes; the multiplier spreads segments.
    const uint64_t start = reinterpret_cast<uintptr_t>(segment) * 0x9E3779B97F4A7C15u >> 32;
    return stripes_[(start + chunk) % stripes_.size()].mutex;
  }

 private:
  struct alignas(64) Stripe {
    std::mutex mutex;
  };
  std::array<Stripe, 1024> stripes_;
};

}  // namespace hbm::box
