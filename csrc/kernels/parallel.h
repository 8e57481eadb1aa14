// Large reductions and copies, divided among a few threads of the process.
//
// The threads belong to the process, not to a group. They start when first needed, on the
// processors of the calling thread, and sleep between uses. An element's result depends only on its
// sources, so any number of threads gives the same bits.
//
// Threads: any.
#pragma once

#include <cstddef>

#include "base/dtype.h"

namespace hbm::kernels {

class Parallel {
 public:
  // `threads`: the most threads that work together, the caller included; 1 or more.
  explicit Parallel(size_t threads) noexcept : threads_(threads) {}

  size_t threads() const noexcept { return threads_; }

  // Does the same as kernels::reduce_to() (reduce.h).
  void reduce_to(void* const* dsts, size_t m, const void* const* srcs, size_t n, size_t count,
                 Dtype dtype, ReduceOp op, size_t divisor) const;
  // Does the same as kernels::reduce() (reduce.h).
  void reduce(void* dst, const void* const* srcs, size_t n, size_t count, Dtype dtype, ReduceOp op,
              size_t divisor) const;
  // Does the same as copy_part() (copy.h).
  void copy(void* dst, const void* src, size_t bytes, size_t whole) const;

 private:
  // Returns the elements of each thread's part; `count` if one thread does all the work.
  size_t part_of(size_t count, size_t element) const noexcept;

  size_t threads_;
};

}  // namespace hbm::kernels
