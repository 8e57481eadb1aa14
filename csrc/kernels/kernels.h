// The kernels: loops compiled once for each instruction set, called by reduce.cpp, accumulate.cpp,
// error_feedback_passes.cpp and tall_skinny_products.cpp. Internal to csrc/kernels and its tests.
//
// A kernel handles vector lanes: a vector lane is an element, or one of the two parts of a complex
// number. Pointers need no alignment. A destination may be a source; otherwise it overlaps no
// source.
//
// Threads: kernels are pure and may run concurrently on disjoint destinations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/dtype.h"
#include "kernels/error_feedback_passes.h"
#include "kernels/tall_skinny_products.h"

namespace hbm::kernels {

struct Operands {
  void* const* dsts;
  size_t m;
  const void* const* srcs;
  size_t n;
  size_t lanes;  // vector lanes of each array
};

// Folds all sources, and stores the result in all destinations, in one pass over memory.
using Fold = void (*)(const Operands& operands, size_t divisor);  // the divisor of AVG
using Scale = void (*)(void* out, const void* in, size_t lanes, double factor);
using Accumulate = void (*)(void* target, const void* source, size_t count, double factor);
using MeasureSum = Measure (*)(const MeasuredSum& sum);
using Pack = void (*)(const Packing& packing);
using Unpack = bool (*)(void* buffer, const void* wire, size_t count);

// The kernels for a dtype and an operator.
struct Plan {
  size_t lanes = 1;  // vector lanes per element
  Fold fold = nullptr;
  Scale scale = nullptr;  // only for PREMUL_SUM
};

// The functions of tall_skinny_products.h, for one instruction set.
struct TallSkinnyProducts {
  using Part = void (*)(const TallSkinnyProduct& product, size_t begin, size_t end);
  Part find_left;
  Part find_right;
  Part set_matrix;
  Part add_to_matrix;
  void (*transpose)(float* to, const float* from, size_t rows, size_t columns);
  void (*normalize)(float* vector, size_t count);
  // `taus` has room for `rank` numbers, `scratch` for 16 * `rank`.
  void (*orthonormalize)(float* columns, size_t rows, size_t rank, float* taus, float* scratch);
};

struct Kernels {
  const char* name;
  // REQUIRES: reduce_unsupported(dtype, op) == nullptr.
  Plan (*plan)(Dtype dtype, ReduceOp op);
  // Returns null for types that accumulate_unsupported() (accumulate.h) rejects.
  Accumulate (*accumulate)(Dtype target, Dtype source, Combine combine);
  // Returns null for types that measured_sum_unsupported() (error_feedback_passes.h) rejects.
  MeasureSum (*measure)(Dtype cache, Dtype gradient, bool squares);
  // Return null for types that pack_unsupported() or unpack_unsupported() (error_feedback_passes.h)
  // reject.
  Pack (*pack)(Dtype wire, Dtype cache);
  Unpack (*unpack)(Dtype buffer, Dtype wire);
  TallSkinnyProducts tall_skinny;
};

extern const Kernels kBaselineKernels;  // "neon" on AArch64: all its processors have it
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512fKernels;
extern const Kernels kAvx512Kernels;
#endif

// Returns the kernels that this processor can run, best first. The last is always the baseline.
std::span<const Kernels* const> runnable_kernels() noexcept;

// Returns the kernels of that name, or the best if the name is empty. Throws as reduce_isa() does.
const Kernels& kernels_named(std::string_view name);

// Returns the kernels that HBMCOMM_ISA names, or the best. Throws as reduce_isa() does.
const Kernels& chosen_kernels();

// Run reduce_to() and scale() with the given kernels.
void reduce_with(const Kernels& kernels, void* const* dsts, size_t m, const void* const* srcs,
                 size_t n, size_t count, Dtype dtype, ReduceOp op, size_t divisor);
void scale_with(const Kernels& kernels, void* dst, const void* src, size_t count, Dtype dtype,
                double factor);

// Runs orthonormalize() (tall_skinny_products.h) with the given kernels.
void orthonormalize(const Kernels& kernels, float* columns, size_t rows, size_t rank);

// Returns a 64-bit integer times a real factor, as scale() defines it, with the same bits on every
// processor. Such an integer may exceed 2^53, beyond which float64 is not exact.
int64_t scale_integer(int64_t value, double factor) noexcept;
uint64_t scale_integer(uint64_t value, double factor) noexcept;

}  // namespace hbm::kernels
