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
  // Uses `threads` threads, including the caller's; each computes an equal part. The arrays must
  // have the same size, a multiple of 64 bytes, and must be aligned to 64 bytes. Throws
  // Error(kInvalid) if they are not, or if `threads` is 0.
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
  bool ending_ = false;  // written while the threads wait for the next pass
  std::vector<std::jthread> threads_;
};

}  // namespace hbm::bench
