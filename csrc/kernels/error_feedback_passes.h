// The passes of error feedback over memory: a gradient is added to its residual and measured, a
// residual is packed into the wire, and the wire is unpacked to the gradients.
//
// - Computed in float32 (float64 if one of the types is float64), with the factors rounded to that
//   type first. Each product, sum and result is rounded separately, to nearest even. Overflow
//   becomes infinity, and a NaN is the canonical NaN, as in reduce.h.
// - A sum is measured as it is made, so that memory is read and written once. Its L1 or L2 sum adds
//   |after[i]|, or the square, of each stored element in float64; the gradient's L1 sum adds
//   |gradient[i]|. Element i is added to partial sum i % kSumLanes, in order. Then partial sum k +
//   n is added to k, for n of half the partial sums, a quarter and so on. So the bits are the same
//   for every vector width and processor.
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
  bool non_temporal = false;  // needs `after` aligned to 64 bytes
};

struct Measure {
  double residual_sum = 0;  // L1 or L2 sum of `after`
  double gradient_sum = 0;  // L1 sum of the gradient; 0 if it is all zeros
};

// Returns null if measured_sum() takes this pair of types, else a clause that lists the pairs it
// takes.
const char* measured_sum_unsupported(Dtype residual, Dtype gradient) noexcept;

// Computes the sum and measures it. REQUIRES: measured_sum_unsupported(residual, gradient) ==
// nullptr. `after` may be `before`, or the gradient if the types are equal, and overlaps neither
// otherwise. Alignment is not needed. Throws as reduce_isa() does (reduce.h).
Measure measured_sum(const MeasuredSum& sum, Dtype residual, Dtype gradient, bool squares);

struct Packing {
  void* wire;
  void* residual;
  size_t count;        // elements
  double factor = 1;   // of the residual, on the wire
  double inverse = 1;  // of the wire, in the residual
};

// Returns null if pack() takes this pair of types, else a clause that lists the pairs it takes.
const char* pack_unsupported(Dtype wire, Dtype residual) noexcept;

// wire = factor * residual. If the wire's elements have fewer bytes, the residual becomes the
// rounding error, residual - inverse * wire, or 0 if the wire is infinite or NaN; else it does not
// change. REQUIRES: pack_unsupported(wire, residual) == nullptr; disjoint arrays. Alignment is not
// needed. Throws as reduce_isa() does (reduce.h).
void pack(const Packing& packing, Dtype wire, Dtype residual);

// Returns null if unpack() takes this pair of types, else a clause that lists the pairs it takes.
const char* unpack_unsupported(Dtype buffer, Dtype wire) noexcept;

// Converts `count` elements. Returns true if all elements of the wire are finite. REQUIRES:
// unpack_unsupported(buffer, wire) == nullptr. `buffer` may be `wire` if the types are equal, and
// does not overlap it otherwise. Alignment is not needed. Throws as reduce_isa() does (reduce.h).
bool unpack(void* buffer, const void* wire, size_t count, Dtype buffer_type, Dtype wire_type);

}  // namespace hbm::kernels
