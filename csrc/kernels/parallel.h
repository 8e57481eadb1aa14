// Large reductions and copies, shared by a few threads of the process.
//
// The threads belong to the process, not to a group: they start when they are first needed, on the
// processors of the thread that needs them, and sleep between. An element's result depends on its
// sources only, so any number of threads gives the same bits.
//
// Threads: any.
#pragma once

#include <cstddef>

#include "base/dtype.h"

namespace hbm {

class Parallel {
 public:
  // `threads`: the most that work at once, the caller's own included; 1 or more.
  explicit Parallel(size_t threads) noexcept : threads_(threads) {}

  size_t threads() const noexcept { return threads_; }

  // hbm::reduce_to() of reduce.h.
  void reduce_to(void* const* dsts, size_t m, const void* const* srcs, size_t n, size_t count,
                 Dtype dtype, ReduceOp op, size_t divisor) const;
  // hbm::reduce() of reduce.h.
  void reduce(void* dst, const void* const* srcs, size_t n, size_t count, Dtype dtype, ReduceOp op,
              size_t divisor) const;
  // copy_part() of copy.h.
  void copy(void* dst, const void* src, size_t bytes, size_t whole) const;

 private:
  // Elements of the parts that are shared out; `count` where one thread does it all.
  size_t part_of(size_t count, size_t element) const noexcept;

  size_t threads_;
};

}  // namespace hbm
