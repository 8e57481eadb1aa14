// The kernels for x86-64 with AVX-512 F and CD alone (Knights Landing); empty elsewhere.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include "kernels/kernels.h"
#include "kernels/tuning.h"

#pragma GCC target("avx512f,avx512cd,f16c,prefer-vector-width=512")
#define HBM_F16C
#define HBM_VECTOR_BYTES 64

#include "kernels/minifloat.h"

namespace hbm::kernels {
namespace {
#include "kernels/codecs.inc"
#include "kernels/reduce.inc"
// The next files use codecs.inc and reduce.inc.
#include "kernels/accumulate.inc"
#include "kernels/error_feedback_passes.inc"
#include "kernels/tall_skinny_products.inc"
}  // namespace

const Kernels kAvx512fKernels = {"avx512f", plan,        accumulate_plan,     measure_plan,
                                 pack_plan, unpack_plan, tall_skinny_products};

}  // namespace hbm::kernels

#endif
