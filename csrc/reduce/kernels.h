// The seam between the driver (reduce.cpp) and the loops, which are compiled once per instruction
// set. Internal to csrc/reduce and its tests.
//
// A kernel handles n lanes: one lane is an element, or one of the two parts of a complex number.
// Pointers need no alignment; out may be an input, and overlaps none otherwise.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "base/dtype.h"

namespace hbm {

using Convert = void (*)(void* out, const void* in, size_t n);
using Combine = void (*)(void* out, const void* a, const void* b, size_t n);  // out = a op b
using Divide = void (*)(void* out, const void* in, size_t n, size_t divisor);
using Multiply = void (*)(void* out, const void* in, size_t n, double factor);

// How one dtype is reduced by one operator: decode -> combine... -> divide -> encode, where every
// step but combine may be absent (null).
struct Plan {
  size_t lanes = 1;   // per element
  size_t stored = 0;  // bytes of a lane in memory
  size_t wide = 0;    // bytes of a lane that combine, divide and multiply see
  Combine combine = nullptr;
  Divide divide = nullptr;      // AVG alone
  Multiply multiply = nullptr;  // PREMUL_SUM alone, run by scale()
  Convert decode = nullptr;     // stored -> wide
  Convert encode = nullptr;     // wide -> stored
  Combine pair = nullptr;       // stored op stored -> stored: all of the above for two sources
};

struct Kernels {
  const char* name;
  // REQUIRES: reduce_unsupported(dtype, op) == nullptr.
  Plan (*plan)(Dtype dtype, ReduceOp op);
};

extern const Kernels kBaselineKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

// Those that this processor can run, best first; baseline is always the last.
std::span<const Kernels* const> runnable_kernels() noexcept;

// The one of that name, or the best if it is empty. Throws as reduce_isa() does.
const Kernels& kernels_named(std::string_view name);

// reduce() and scale() on chosen kernels.
void reduce_with(const Kernels& kernels, void* dst, const void* const* srcs, size_t n, size_t count,
                 Dtype dtype, ReduceOp op, size_t divisor);
void scale_with(const Kernels& kernels, void* dst, const void* src, size_t count, Dtype dtype,
                double factor);

}  // namespace hbm
