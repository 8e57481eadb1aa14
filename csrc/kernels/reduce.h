// Reduction kernels: reduce n source arrays to one, element by element, in the order of the
// sources.
//
// The order guarantees bit-identical results. An element becomes ((s0 op s1) op s2) ... for every
// count, vector width and processor, so every rank that reduces the same sources gets the same
// bits.
// - Floating-point types narrower than 32 bits (float16, bfloat16, the float8 types, and the parts
//   of complex32) accumulate in float32 and are rounded once, to nearest even. Overflow and NaN are
//   as in PyTorch's conversion from float32.
// - A NaN result is the canonical NaN (positive, quiet, no payload), because processors differ in
//   the NaN that they pass on if two operands are NaN.
// - AVG divides the sum by `divisor`. A mean of integers is exact, truncated toward zero: integers
//   of up to 32 bits accumulate in 64 bits, wider ones in 128.
// - Integer SUM and PRODUCT wrap. MIN and MAX propagate NaN. MIN and MAX return the later of two
//   zeros, which are equal even if their signs differ. A complex product is the plain
//   (ac - bd, ad + bc).
// - On bool any byte except 0 is true; SUM and MAX are OR, PRODUCT and MIN are AND.
//
// Threads: all functions are pure and may run concurrently on disjoint destinations.
#pragma once

#include <cstddef>

#include "base/dtype.h"

namespace hbm::kernels {

// Returns null if `op` is defined for `dtype`, else the reason (a clause such as "complex numbers
// have no order").
const char* reduce_unsupported(Dtype dtype, ReduceOp op) noexcept;

// dst[i] = srcs[0][i] op ... op srcs[n-1][i] for i in [0, count). A single source is copied (AVG
// still divides it). REQUIRES: n >= 1, reduce_unsupported(dtype, op) == nullptr, divisor >= 1 (used
// by AVG alone). `dst` may be one of the sources; otherwise it overlaps none of them. PREMUL_SUM
// reduces as SUM, because the caller has already applied the factor with scale(). Sources and `dst`
// need no alignment.
void reduce(void* dst, const void* const* srcs, size_t n, size_t count, Dtype dtype, ReduceOp op,
            size_t divisor);

// reduce() with the result stored in each of dsts[0] .. dsts[m-1]. Each destination may be one of
// the sources, and overlaps no other source or destination. REQUIRES: m >= 1.
void reduce_to(void* const* dsts, size_t m, const void* const* srcs, size_t n, size_t count,
               Dtype dtype, ReduceOp op, size_t divisor);

// dst[i] = src[i] * factor, for PREMUL_SUM. `dst` may equal `src`. float64 and complex128 are
// multiplied in float64; other floats are multiplied in float32, by the factor rounded to float32.
// Integers up to 2^53 are multiplied in float64. Larger integers, some of which a float64 cannot
// hold, are multiplied exactly. The product of an integer is truncated towards zero and clamped to
// the range of the type; NaN becomes 0. REQUIRES: reduce_unsupported(dtype, ReduceOp::kPremulSum)
// == nullptr.
void scale(void* dst, const void* src, size_t count, Dtype dtype, double factor);

// Returns the instruction set of the kernels in use: "avx512", "avx512f", "avx2", "neon" or
// "baseline". It is the best that this processor runs, unless HBMCOMM_ISA names another. It changes
// the speed of reductions, never their bits. Throws Error if HBMCOMM_ISA names no instruction set
// (kInvalid), or an unusable one (kUnavailable). reduce() and scale() throw the same errors, so
// call this once at start.
const char* reduce_isa();

}  // namespace hbm::kernels
