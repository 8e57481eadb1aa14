// The kernels for any processor, by the instruction set that the compiler takes for granted.
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "reduce/kernels.h"
#include "reduce/minifloat.h"
#include "reduce/scale_integer.h"

namespace hbm {
namespace {
#include "reduce/kernels.inc"
#include "reduce/plans.inc"
}  // namespace

const Kernels kBaselineKernels = {"baseline", plan};

}  // namespace hbm
