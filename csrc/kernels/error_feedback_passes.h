// The passes of error feedback over memory: a gradient is added to its residual and measured, a
// residual is packed into the wire, and the wire is unpacked to the gradients.
//
// - Computed in float32 (float64 if one of the types is float64), the factors rounded to that type
//   first. Each product, sum and result is rounded on its own, to nearest even; what is too large
//   becomes infinity, and a NaN is the canonical one, as in reduce.h.
// - A sum is measured as it is made, so that memory is read and written once. Its moment is the sum
//   of |after[i]|, or of its square, of what is stored, in float64, and so is that of
//   |gradient[i]|. Element i is added to lane i % kMomentLanes, in order, and lane k + n to lane k,
//   for n of half the lanes, a quarter and so on. So the bits are the same for every vector width
//   and processor.
//
// Threads: all functions are pure and may run concurrently on disjoint memory.
#pragma once

#include <cstddef>

#include "base/dtype.h"

namespace hbm {

inline constexpr size_t kMomentLanes = 16;

// after[i] = before[i] + factor * gradient[i]
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
  double gradient = 0;  // its moment, without squares; 0 if all of it is 0
};

// Null if measured_sum() takes this pair of types, else which it does take, as a clause.
const char* measured_sum_unsupported(Dtype residual, Dtype gradient) noexcept;

// REQUIRES: measured_sum_unsupported(residual, gradient) == nullptr. `after` may be `before`, or
// the gradient if the types are equal, and overlaps neither otherwise. None needs alignment. Throws
// as reduce_isa() does (reduce.h).
Measure measured_sum(const MeasuredSum& sum, Dtype residual, Dtype gradient, bool squares);

struct Packing {
  void* wire;
  void* residual;
  size_t count;        // elements
  double factor = 1;   // of the residual, on the wire
  double inverse = 1;  // of what lies on the wire, in the residual
};

// Null if pack() takes this pair of types, else which it does take, as a clause.
const char* pack_unsupported(Dtype wire, Dtype residual) noexcept;

// wire = factor * residual. If the wire's elements have fewer bytes, the residual keeps the
// rounding error, residual - inverse * wire, or 0 where the wire is infinite or NaN; else it stays
// as it is. REQUIRES: pack_unsupported(wire, residual) == nullptr; disjoint arrays. None needs
// alignment. Throws as reduce_isa() does (reduce.h).
void pack(const Packing& packing, Dtype wire, Dtype residual);

// Null if unpack() takes this pair of types, else which it does take, as a clause.
const char* unpack_unsupported(Dtype buffer, Dtype wire) noexcept;

// Converts `count` elements, and returns whether all on the wire are finite.
// REQUIRES: unpack_unsupported(buffer, wire) == nullptr; `buffer` may be `wire` if the types are
// equal, and does not overlap it otherwise. None needs alignment.
// Throws as reduce_isa() does (reduce.h).
bool unpack(void* buffer, const void* wire, size_t count, Dtype buffer_type, Dtype wire_type);

}  // namespace hbm
