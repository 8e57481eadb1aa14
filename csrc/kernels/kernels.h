// The kernels: loops compiled once for each instruction set, which reduce.cpp, accumulate.cpp,
// error_feedback_passes.cpp and thin_products.cpp call. Internal to csrc/kernels and its tests.
//
// A kernel handles lanes: one lane is an element, or one of the two parts of a complex number.
// Pointers need no alignment; a destination may be a source, and overlaps none otherwise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/dtype.h"
#include "kernels/error_feedback_passes.h"
#include "kernels/thin_products.h"

namespace hbm {

struct Operands {
  void* const* dsts;
  size_t m;
  const void* const* srcs;
  size_t n;
  size_t lanes;  // of each array
};

// Folds all sources, and stores the result in all destinations, in one pass over memory.
using Fold = void (*)(const Operands& operands, size_t divisor);  // the divisor of AVG
using Scale = void (*)(void* out, const void* in, size_t lanes, double factor);
using Accumulate = void (*)(void* target, const void* source, size_t count, double factor);
using MeasureSum = Measure (*)(const MeasuredSum& sum);
using Pack = void (*)(const Packing& packing);
using Unpack = bool (*)(void* buffer, const void* wire, size_t count);

// How one dtype is reduced by one operator.
struct Plan {
  size_t lanes = 1;  // per element
  Fold fold = nullptr;
  Scale scale = nullptr;  // PREMUL_SUM alone
};

// The functions of thin_products.h, for one instruction set.
struct ThinProducts {
  using Part = void (*)(const ThinProduct& product, size_t begin, size_t end);
  Part find_left;
  Part find_right;
  Part set_matrix;
  Part add_to_matrix;
  void (*transpose)(float* to, const float* from, size_t rows, size_t columns);
  void (*normalize)(float* vector, size_t count);
  // `taus` has room for `rank` numbers, `scratch` for 16 times as many.
  void (*orthonormalize)(float* columns, size_t rows, size_t rank, float* taus, float* scratch);
};

struct Kernels {
  const char* name;
  // REQUIRES: reduce_unsupported(dtype, op) == nullptr.
  Plan (*plan)(Dtype dtype, ReduceOp op);
  // Null for types that accumulate_unsupported() (accumulate.h) rejects.
  Accumulate (*accumulate)(Dtype target, Dtype source, Combine combine);
  // Null for types that measured_sum_unsupported() (error_feedback_passes.h) rejects.
  MeasureSum (*measure)(Dtype cache, Dtype gradient, bool squares);
  // Null for types that pack_unsupported() and unpack_unsupported() (error_feedback_passes.h)
  // reject.
  Pack (*pack)(Dtype wire, Dtype cache);
  Unpack (*unpack)(Dtype buffer, Dtype wire);
  ThinProducts thin;
};

extern const Kernels kBaselineKernels;  // named "neon" on AArch64, which has no processor without
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

// The kernels that this processor can run, best first; baseline is always the last.
std::span<const Kernels* const> runnable_kernels() noexcept;

// The one of that name, or the best if it is empty. Throws as reduce_isa() does.
const Kernels& kernels_named(std::string_view name);

// The kernels that HBMCOMM_ISA names, or the best. Throws as reduce_isa() does.
const Kernels& chosen_kernels();

// reduce_to() and scale() on chosen kernels.
void reduce_with(const Kernels& kernels, void* const* dsts, size_t m, const void* const* srcs,
                 size_t n, size_t count, Dtype dtype, ReduceOp op, size_t divisor);
void scale_with(const Kernels& kernels, void* dst, const void* src, size_t count, Dtype dtype,
                double factor);

// orthonormalize() (thin_products.h) on chosen kernels.
void orthonormalize(const Kernels& kernels, float* columns, size_t rows, size_t rank);

// A 64-bit integer times a real factor, as scale() defines it, with the same bits on every
// processor: such an integer may lie beyond 2^53, where float64 no longer holds it.
int64_t scale_integer(int64_t value, double factor) noexcept;
uint64_t scale_integer(uint64_t value, double factor) noexcept;

}  // namespace hbm
