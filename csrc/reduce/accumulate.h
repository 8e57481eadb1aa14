// The memory box's accumulate: one array is added to another, times a factor.
//
// The result of an element does not depend on the count, the vector width or the processor:
// - float32 and float64 multiply, then add, each rounded, by the factor rounded to the type;
//   float16 and bfloat16 do so in float32, and are rounded once, to nearest even.
// - A NaN that results is the canonical one, as in reduce.h.
// - int32 and int64 are multiplied as scale() does (reduce.h; by 1: exactly), and the sum wraps.
//
// Threads: all functions are pure and may run concurrently on disjoint targets.
#pragma once

#include <cstddef>

#include "base/dtype.h"

namespace hbm {

// Null if accumulate() is defined for dtype, else why it is not, as a clause.
const char* accumulate_unsupported(Dtype dtype) noexcept;

// target[i] += scale * source[i] for i in [0, count).
// REQUIRES: accumulate_unsupported(dtype) == nullptr; target may be source, and does not overlap it
// otherwise. Both need only the alignment of bytes.
// Throws as reduce_isa() does (reduce.h), so ask that once at start.
void accumulate(void* target, const void* source, size_t count, Dtype dtype, double scale);

}  // namespace hbm
