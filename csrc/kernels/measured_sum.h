// The pass of layer dropping over a gradient: it is added to what was kept of those before it, and
// the sum is measured as it is made, so that memory is read and written once.
//
//   after[i] = before[i] + factor * gradient[i]
//
// - Computed in float32 (float64 for float64), the factor rounded to that type first. The product
//   is rounded, then the sum, then the result to the cache's type, each to nearest even; what is
//   too large becomes infinity, and a NaN is the canonical one, as in reduce.h.
// - The moment is the sum of |after[i]|, or of its square, of what is stored, in float64. Element i
//   is added to lane i % kMomentLanes, in order, and lane k + n to lane k, for n of half the lanes,
//   a quarter and so on. So the bits are the same for every vector width and processor.
//
// Threads: all functions are pure and may run concurrently on disjoint sums.
#pragma once

#include <cstddef>

#include "base/dtype.h"

namespace hbm {

inline constexpr size_t kMomentLanes = 16;

struct MeasuredSum {
  void* after;
  const void* before;  // of after's type; null for zeros
  const void* gradient;
  size_t count;           // elements
  double factor = 1;      // of the gradient
  bool streamed = false;  // past the caches, if the processor can and after is aligned to 64 bytes
};

struct Measure {
  double moment = 0;
  bool any = false;  // element of the gradient is not 0; a NaN is not
};

// Null if measured_sum() takes this pair of types, else which it does take, as a clause.
const char* measured_sum_unsupported(Dtype cache, Dtype gradient) noexcept;

// REQUIRES: measured_sum_unsupported(cache, gradient) == nullptr. `after` may be `before`, or the
// gradient if the types are equal, and overlaps neither otherwise. None needs alignment.
// Throws as reduce_isa() does (reduce.h).
Measure measured_sum(const MeasuredSum& sum, Dtype cache, Dtype gradient, bool squares);

}  // namespace hbm
