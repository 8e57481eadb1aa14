#include "kernels/measured_sum.h"

#include "kernels/kernels.h"

namespace hbm {

const char* measured_sum_unsupported(Dtype cache, Dtype gradient) noexcept {
  if (kBaselineKernels.measure(cache, gradient, false) != nullptr) return nullptr;
  return "a cache of float32, bfloat16 or float16 takes gradients of these types, and one of "
         "float64 takes float64";
}

Measure measured_sum(const MeasuredSum& sum, Dtype cache, Dtype gradient, bool squares) {
  return chosen_kernels().measure(cache, gradient, squares)(sum);
}

}  // namespace hbm
