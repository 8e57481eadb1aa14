// The kernels for x86-64 with AVX2 and F16C; empty elsewhere.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include "reduce/kernels.h"
#include "reduce/scale_integer.h"

#pragma GCC target("avx2,f16c")
#define HBM_F16C
#define HBM_VECTOR_BYTES 32

#include "reduce/minifloat.h"

namespace hbm {
namespace {
#include "reduce/codecs.inc"
#include "reduce/kernels.inc"
#include "reduce/measured_sum.inc"
#include "reduce/packed.inc"
#include "reduce/plans.inc"
#include "reduce/scaled_sum.inc"
}  // namespace

const Kernels kAvx2Kernels = {"avx2", plan, accumulate_plan, measure_plan, pack_plan, unpack_plan};

}  // namespace hbm

#endif
