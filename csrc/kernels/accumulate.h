// The memory box's accumulate: adds one array, times a factor, to another one, or puts it in its
// place, and converts it on the way.
//
// The result of an element does not depend on the count, the vector width or the processor:
// - Real numbers are computed in float64 if the target or the source is float64, else in float32;
//   the factor is rounded to that type first. The product is rounded, then the sum, then the result
//   to the target's type, each to nearest even; what is too large becomes infinity.
// - A NaN that results is the canonical one, as in reduce.h.
// - int32 and int64 are multiplied as scale() does (reduce.h; by 1: exactly), and a sum wraps.
//
// Threads: all functions are pure and may run concurrently on disjoint targets.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace hbm {

// Element by element: target += scale * source, or target = scale * source.
struct Formula {
  Dtype target{};
  Dtype source{};
  Combine combine = Combine::kAdd;
  double scale = 1;

  // How many bytes of the source go with so many of the target, a multiple of its element.
  uint64_t source_bytes(uint64_t target_bytes) const noexcept {
    return target_bytes / element_size(target) * element_size(source);
  }
};

// Null if accumulate() takes this pair of types, else which it does take, as a clause.
const char* accumulate_unsupported(Dtype target, Dtype source) noexcept;

// Applies the formula to `count` elements.
// REQUIRES: accumulate_unsupported(formula.target, formula.source) == nullptr; target may be source
// if the types are equal, and does not overlap it otherwise. Both need only the alignment of bytes.
// Throws as reduce_isa() does (reduce.h), so ask that once at start.
void accumulate(void* target, const void* source, size_t count, const Formula& formula);

}  // namespace hbm
