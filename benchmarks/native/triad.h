// The bound of accumulate: STREAM's triad, a[i] = b[i] + factor * c[i] in float32, with
// non-temporal stores on x86-64. It reads two arrays and writes one.
//
// Threads: one at a time.
#pragma once

#include <barrier>
#include <cstddef>
#include <span>
#include <thread>
#include <vector>

namespace hbm::bench {

class Triad {
 public:
  // Uses `threads` threads, the caller's included, each for an equal part. Throws Error(kInvalid)
  // unless the arrays have equal sizes, in whole lines of 64 bytes, and are aligned to them.
  Triad(std::span<std::byte> a, std::span<const std::byte> b, std::span<const std::byte> c,
        size_t threads);
  ~Triad();

  // Makes one pass.
  void run();

 private:
  void work(size_t thread);

  const std::span<std::byte> a_;
  const std::span<const std::byte> b_;
  const std::span<const std::byte> c_;
  std::barrier<> together_;
  bool ending_ = false;  // written between the barriers at the end and at the start of a pass
  std::vector<std::jthread> threads_;
};

}  // namespace hbm::bench
