// The bound of accumulate: STREAM's triad, a[i] = b[i] + factor * c[i] in float32, with stores that
// go past the caches where the processor has them: two arrays read and one written, nothing else.
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
  // Runs on `threads` threads, the caller's included, each with an equal part. Throws
  // Error(kInvalid) unless the arrays are as long as one another and aligned to 64 bytes.
  Triad(std::span<std::byte> a, std::span<const std::byte> b, std::span<const std::byte> c,
        size_t threads);
  ~Triad();

  // One pass.
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
