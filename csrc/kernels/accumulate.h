// The memory box's accumulate: multiplies the elements of a source array by a factor, and adds the
// products to a target array or assigns them. The arrays may have different types.
//
// The result of an element does not depend on the count, the vector width or the processor:
// - Real numbers are computed in float64 if the target or the source is float64, else in float32;
//   the factor is rounded to that type first. The product, the sum, and the result in the target's
//   type are each rounded to nearest even; overflow becomes infinity.
// - A NaN result is the canonical NaN, as in reduce.h.
// - int32 and int64 are multiplied as scale() multiplies them (reduce.h). A factor of 1 leaves them
//   unchanged. A sum wraps.
//
// Threads: all functions are pure and may run concurrently on disjoint targets.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace hbm::kernels {

// Element by element: target += scale * source, or target = scale * source.
struct Formula {
  Dtype target{};
  Dtype source{};
  Combine combine = Combine::kAdd;
  double scale = 1;

  // Returns the bytes of the source for `target_bytes`, a multiple of the target's element.
  uint64_t source_bytes(uint64_t target_bytes) const noexcept {
    return target_bytes / element_size(target) * element_size(source);
  }
};

// Returns null if accumulate() takes this pair of types, else a clause that lists the pairs it
// takes.
const char* accumulate_unsupported(Dtype target, Dtype source) noexcept;

// Applies the formula to `count` elements. REQUIRES: accumulate_unsupported(formula.target,
// formula.source) == nullptr. The target may be the source if the types are equal; otherwise they
// do not overlap. Neither needs alignment. Throws as reduce_isa() does (reduce.h), so call
// reduce_isa() once at the start of the program.
void accumulate(void* target, const void* source, size_t count, const Formula& formula);

}  // namespace hbm::kernels
