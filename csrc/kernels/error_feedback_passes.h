// The passes of error feedback over memory. One adds a gradient to its residual and measures the
// sum. One packs a residual into the buffer that is sent (the wire). One unpacks the received wire
// into the gradients.
//
// - The passes compute in float32 (float64 if one of the types is float64). The factors are rounded
//   to that type first. Each product, sum and result is rounded separately, to nearest even.
//   Overflow becomes infinity, and a NaN is the canonical NaN, as in reduce.h.
// - measured_sum() measures each element when it stores the element, so memory is read and written
//   once. The residual's L1 sum adds |after[i]| in float64, and its L2 sum adds the square of
//   after[i]. Both use the stored value of after[i]. The gradient's L1 sum adds |gradient[i]|.
// - The bits of these sums are the same for every vector width and processor. Element i is added to
//   partial sum i % kSumLanes, in order. For n = kSumLanes / 2, kSumLanes / 4 and so on down to 1,
//   partial sum k + n is then added to partial sum k, for each k < n.
//
// Threads: all functions are pure and may run concurrently on disjoint memory.
#pragma once

#include <cstddef>

#include "base/dtype.h"

namespace hbm::kernels {

inline constexpr size_t kSumLanes = 16;

// after[i] = before[i] + factor * gradient[i]
struct MeasuredSum {
  void* after;
  const void* before;  // of the type of `after`; null for zeros
  const void* gradient;
  size_t count;               // elements
  double factor = 1;          // of the gradient
  bool non_temporal = false;  // ignored unless `after` is aligned to 64 bytes
};

struct Measure {
  double residual_sum = 0;  // L1 or L2 sum of `after`
  double gradient_sum = 0;  // L1 sum of the gradient; 0 only if it is all zeros
};

// Returns null if measured_sum() takes this pair of types, else a clause that lists the pairs it
// takes.
const char* measured_sum_unsupported(Dtype residual, Dtype gradient) noexcept;

// Computes the sum and measures it: by its L2 sum if `squares`, else by its L1 sum. REQUIRES:
// measured_sum_unsupported(residual, gradient) == nullptr. `after` may be `before`, or the gradient
// if the types are equal; otherwise it overlaps neither. Alignment is not needed. Throws as
// reduce_isa() does (reduce.h).
Measure measured_sum(const MeasuredSum& sum, Dtype residual, Dtype gradient, bool squares);

struct Packing {
  void* wire;
  void* residual;
  size_t count;        // elements
  double factor = 1;   // wire = factor * residual
  double inverse = 1;  // rounding error = residual - inverse * wire
};

// Returns null if pack() takes this pair of types, else a clause that lists the pairs it takes.
const char* pack_unsupported(Dtype wire, Dtype residual) noexcept;

// wire = factor * residual. If an element of the wire has fewer bytes than an element of the
// residual, the residual then becomes the rounding error, residual - inverse * wire. An element of
// the residual becomes 0 if its element of the wire is infinite or NaN. If an element of the wire
// has as many bytes or more, the residual does not change. REQUIRES: pack_unsupported(wire,
// residual) == nullptr; disjoint arrays. Alignment is not needed. Throws as reduce_isa() does
// (reduce.h).
void pack(const Packing& packing, Dtype wire, Dtype residual);

// Returns null if unpack() takes this pair of types, else a clause that lists the pairs it takes.
const char* unpack_unsupported(Dtype buffer, Dtype wire) noexcept;

// Converts `count` elements. Returns true if all elements of the wire are finite. REQUIRES:
// unpack_unsupported(buffer, wire) == nullptr. `buffer` may be `wire` if the types are equal;
// otherwise they do not overlap. Alignment is not needed. Throws as reduce_isa() does (reduce.h).
bool unpack(void* buffer, const void* wire, size_t count, Dtype buffer_type, Dtype wire_type);

}  // namespace hbm::kernels
