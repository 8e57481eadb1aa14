// The kernels for any processor, by the instruction set that the compiler takes for granted.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include "reduce/kernels.h"
#include "reduce/minifloat.h"
#include "reduce/scale_integer.h"

#define HBM_VECTOR_BYTES 16

namespace hbm {
namespace {
#include "reduce/codecs.inc"
#include "reduce/kernels.inc"
#include "reduce/measured_sum.inc"
#include "reduce/packed.inc"
#include "reduce/plans.inc"
#include "reduce/scaled_sum.inc"
}  // namespace

#if defined(__aarch64__)
constexpr const char* kName = "neon";
#else
constexpr const char* kName = "baseline";
#endif

const Kernels kBaselineKernels = {kName,        plan,      accumulate_plan,
                                  measure_plan, pack_plan, unpack_plan};

}  // namespace hbm
