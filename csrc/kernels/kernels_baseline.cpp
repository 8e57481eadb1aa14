// The kernels for any processor, with the compiler's default instruction set.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include "kernels/kernels.h"
#include "kernels/minifloat.h"
#include "kernels/tuning.h"

#define HBM_VECTOR_BYTES 16

namespace hbm::kernels {
namespace {
#include "kernels/codecs.inc"
#include "kernels/reduce.inc"
// The next files use codecs.inc and reduce.inc.
#include "kernels/accumulate.inc"
#include "kernels/error_feedback_passes.inc"
#include "kernels/tall_skinny_products.inc"
}  // namespace

#if defined(__aarch64__)
constexpr const char* kName = "neon";
#else
constexpr const char* kName = "baseline";
#endif

const Kernels kBaselineKernels = {kName,     plan,        accumulate_plan,     measure_plan,
                                  pack_plan, unpack_plan, tall_skinny_products};

}  // namespace hbm::kernels
